"""FileStore: processes that come, go and are killed leave the file right, or no file."""

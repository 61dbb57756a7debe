"""Point-to-point messages: posting, the unexpected queue, receives from any source."""

"""Small parts that need the standard library only: deadlines, debug level, promise, error wire."""

"""Small parts that need the standard library only: deadlines, debug level, errors on the wire."""

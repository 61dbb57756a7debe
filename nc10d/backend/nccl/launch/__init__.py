"""A launch as a table of C calls: planned, laid out, and found again by the arrays."""

"""Programs with many kinds of calls, as data: drawn, shrunk, printed, run, and predicted."""

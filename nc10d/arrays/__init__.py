"""Arrays as memory: element types, buffers, NumPy views, intervals, checks of arguments."""

"""Arrays as memory: element types, buffers, views, intervals, checks of arguments."""

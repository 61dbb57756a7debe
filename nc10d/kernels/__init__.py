"""Compiled code that works on raw addresses, and where it is kept between processes."""

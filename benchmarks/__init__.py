"""Measurements of nc10d for its developers; not in the wheel."""

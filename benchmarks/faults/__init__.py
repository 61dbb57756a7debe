"""Fault scenarios, nc10d beside gloo."""

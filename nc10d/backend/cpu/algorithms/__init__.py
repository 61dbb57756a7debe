"""Collectives as pure functions from a call and a group's shape to each rank's steps."""

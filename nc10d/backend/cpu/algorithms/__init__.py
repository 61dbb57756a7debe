"""Collectives as pure functions from a call and a group's shape to the steps of each rank."""

"""torch's optimizers with state divided over a group's ranks, or with overlapping steps."""

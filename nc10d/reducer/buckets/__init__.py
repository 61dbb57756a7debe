"""The memory for gradients: buckets of dense arrays, of sparse rows, and on devices.

`storage` makes all buckets in a plan. The package imports `hooks`, the packers and the pure
modules beside it (`plan`, `schedule`, `settings`, `gradients`); `backward` and `reducer` import it.
"""

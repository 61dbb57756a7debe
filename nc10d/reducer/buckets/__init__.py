"""The memory of gradients: buckets of dense arrays, of sparse rows, and on devices.

`storage` makes all buckets of a plan. This package imports `hooks`, the packers and the pure
modules beside it (`plan`, `schedule`, `settings`, `gradients`). `backward` and `reducer` import it.
"""

"""Average gradients in buckets, while the backward pass still runs.

A gradient is an array here: no module knows a framework, and only the group that the caller gives
communicates. Imports go in one direction: `plan`, `schedule`, `settings`, `gradients` and the
packers; then `hooks`; then `buckets`; then `backward` and `stats`; then `reducer`.
"""

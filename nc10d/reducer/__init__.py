"""Gradients in buckets, reduced while the backward pass still runs.

`plan` (which gradient lies in which bucket) and `schedule` (which bucket may leave) are pure;
`usage`, `hooks` and `reducer` communicate, by the group that they are given. Nothing here knows a
framework or a backend: a gradient is an array.
"""

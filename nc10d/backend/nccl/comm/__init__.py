"""Communicators of NCCL: made within a deadline, each with a stream of its own."""

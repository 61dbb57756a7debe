"""NCCL's communicators: made within a deadline, each with its own stream."""

"""Times the collectives of a job, in nccl-tests' columns, and checks their results."""

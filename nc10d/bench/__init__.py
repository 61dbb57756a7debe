"""Times a job's collectives, in nccl-tests' columns, and checks their results."""

from nc10d.base.call_site import count_as_users

count_as_users(__file__)

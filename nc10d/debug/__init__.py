"""Diagnosis of failed jobs: `python -m nc10d.debug DIR` reads all ranks' dumps."""

from nc10d.base.call_site import count_as_users

count_as_users(__file__)

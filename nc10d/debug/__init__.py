"""Diagnosis of failed jobs: `python -m nc10d.debug DIR` reads the dumps of all ranks."""

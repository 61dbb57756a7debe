"""The pytest plugin's parts (pytest_nc10d.py) that need nc10d."""

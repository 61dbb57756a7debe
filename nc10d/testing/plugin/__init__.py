"""The parts of the pytest plugin (pytest_nc10d.py) that need nc10d."""

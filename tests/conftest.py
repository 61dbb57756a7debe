"""Shared test settings."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("backend/cpu", "emulators"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

#!/usr/bin/env bash
# Everything about GPUs that a machine with one can prove: `make gpu-check`, or this script.
# Needs a checkout and a Python with numpy, numba, cuda-bindings, pytest and some libnccl, by
# PYTHON=...; no install, no network. Prints a table, writes gpu-results.json, and fails on a wrong
# element or on a row that this machine should have had.
set -euo pipefail
cd "$(dirname "$0")/.."
for folder in tests/emulators tests/backend/staged tests/backend/nccl tests/torch tools; do
  PYTHONPATH="$PWD/$folder${PYTHONPATH:+:$PYTHONPATH}"
done
export PYTHONPATH="$PWD:$PYTHONPATH"
export PYTHONDONTWRITEBYTECODE=1
exec timeout 480 "${PYTHON:-python3}" tools/gpu_check.py "$@"

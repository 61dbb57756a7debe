#!/usr/bin/env bash
# Run all checks that need a GPU: `make gpu-check`, or this script.
# Needs a copy of the tree, and by PYTHON=... a Python with numpy, numba, cuda-bindings, pytest and
# libnccl; no install, no network, no git. Prints a table, and which claims of the docs it shows;
# writes gpu-results.json (into the folder GPU_CHECK_RESULTS) after each row. Fails on a wrong
# element, and on a check that can't run although this machine has the hardware. Without a GPU it
# tells what has not run.
set -euo pipefail
cd "$(dirname "$0")/.."
for folder in tests/emulators tests/backend/staged tests/backend/nccl tests/torch tools; do
  PYTHONPATH="$PWD/$folder${PYTHONPATH:+:$PYTHONPATH}"
done
export PYTHONPATH="$PWD:$PYTHONPATH"
export PYTHONDONTWRITEBYTECODE=1
exec timeout 900 "${PYTHON:-python3}" tools/gpu_check.py "$@"

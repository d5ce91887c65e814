#!/usr/bin/env bash
# The lane for a machine with one CUDA device: about ten minutes, its log is what it prints (docs/gpu/).
#   PYTHON= a Python with this package's dependencies and a CUDA build of torch (default: the one of `make`)
#   TURNOUT_SGLANG_PYTHON= the Python of an environment with SGLang, for the runs on SGLang
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
export PYTHONPATH=$PWD/src OMP_NUM_THREADS=4
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
"$PYTHON" -c 'import sys, torch; print("python", sys.version.split()[0], "torch", torch.__version__, "cuda", torch.version.cuda)
sys.exit(None if torch.cuda.is_available() else "this torch sees no CUDA device")'
timeout 600 "$PYTHON" -m pytest tests/gpu -v --durations 0

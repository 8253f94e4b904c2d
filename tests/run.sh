#!/usr/bin/env bash
# Runs the tests in the Python environment that is active: tests/run.sh [--fast | --all | --gpu] [arguments of pytest]
set -euo pipefail
cd "$(dirname "$0")/.."
# One thread for each process: two OpenMP pools on few cores wait for each other most of the time.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# One process has the GPU.
if [ "${1:-}" = --gpu ]; then
    exec python -m pytest -m gpu tests/gpu "${@:2}"
fi
# Two files of tests side by side: most of them wait for one process at a time. -n 0 runs them one by one.
exec python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"

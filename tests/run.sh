#!/usr/bin/env bash
# Runs the tests in the Python environment that is active: tests/run.sh [--fast | --all | --gpu [PART ...]] [arguments of pytest]
set -euo pipefail
cd "$(dirname "$0")/.."
# One thread for each process: two OpenMP pools on few cores wait for each other most of the time.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# One process has the GPU. PART is one of the names below; without one, all of them in this order, the most telling first.
if [ "${1:-}" = --gpu ]; then
    shift
    parts=()
    while [ $# -gt 0 ] && [[ $1 != -* ]]; do
        parts+=("tests/gpu/test_$1.py")
        shift
    done
    [ ${#parts[@]} -gt 0 ] || parts=(tests/gpu/test_{card,update,memory,profile,demo,generation,offload,vllm}.py)
    exec python -m pytest -m gpu "${parts[@]}" "$@"
fi
# Two files of tests side by side: most of them wait for one process at a time. -n 0 runs them one by one.
exec python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"

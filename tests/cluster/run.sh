#!/usr/bin/env bash
# Runs the tests on a SLURM cluster of two nodes that they make themselves: tests/cluster/run.sh [--long]
# --long runs the faults that take minutes in place of those of `./launch/test.sh --all`. Needs root.
set -euo pipefail
cd "$(dirname "$0")/../.."
tests=tests/cluster/test_cluster.py
if [ "${1:-}" = --long ]; then
    tests=tests/cluster/long_runs.py
    shift
fi
exec python -m pytest --all -s "$tests" "$@"

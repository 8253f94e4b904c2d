#!/usr/bin/env bash
# Makes an environment of its own and runs the tests.
#   ./launch/test.sh [any argument of pytest]
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
make_environment .venv-test dev
# One thread for each process: two OpenMP pools on few cores wait for each other most of the time.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec python -m pytest "$@"

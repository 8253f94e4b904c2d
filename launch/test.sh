#!/usr/bin/env bash
# Makes an environment of its own and runs the tests.
#   ./launch/test.sh [--fast | --gpu] [any argument of pytest]
# --fast: the light tests and a dozen core tests, in three minutes. --gpu: what only a CUDA device can show.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
make_environment .venv-test dev
exec tests/run.sh "$@"

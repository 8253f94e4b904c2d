#!/usr/bin/env bash
# Makes a virtual environment, .venv-test, and runs the tests in it.
#   ./launch/test.sh [--fast | --all | --gpu [PART ...]] [any argument of pytest]
# Without an option: each promise of the README once, about 6 minutes on 2 cores.
# --fast: the quick tests. --all: everything. --gpu: what only a CUDA device can show; PART is card, update, memory,
# profile, demo, generation, offload or vllm.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
make_environment .venv-test dev
exec tests/run.sh "$@"

#!/usr/bin/env bash
# One command from a fresh machine to a trained adapter and a report: no GPU, no Hub account.
#   ./launch/quickstart.sh [any setting of the training program, for example --seed 1]
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
make_environment .venv demo
exec grpo-math demo "$@"

#!/usr/bin/env bash
# `grpo-math serve --make_env` for a checkout in which nothing is installed yet: makes the environment that a vLLM server runs in
# (.venv-vllm, or the folder given) and prints the path of its `vllm`:
#   GRPO_MATH_VLLM=$(./launch/vllm_environment.sh)
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
find_python
exec "$PYTHON" -m grpo_math.train.vllm_env "$@"

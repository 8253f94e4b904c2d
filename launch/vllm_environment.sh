#!/usr/bin/env bash
# `grpo-math serve --make_env` for a checkout in which nothing is installed yet: makes the environment that a vLLM server runs in
# (.venv-vllm, or the folder given) and prints the path of its `vllm`:
#   GRPO_MATH_VLLM=$(./launch/vllm_environment.sh)
# Without a GPU it installs this package there too: tests/generation/test_colocated.py trains next to vLLM.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
find_python
vllm=$("$PYTHON" -m grpo_math.generation.vllm_env "$@")
folder=${vllm%/bin/vllm}
wanted=$(cat pyproject.toml constraints-vllm.txt "$folder/ready" - <<<"$PWD" | cksum)
if ! command -v nvidia-smi >/dev/null && [ "$(cat "$folder/trains" 2>/dev/null)" != "$wanted" ]; then
    # vLLM for the CPU pins setuptools itself.
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-warn-conflicts \
        -c <(grep -v '^setuptools==' constraints-vllm.txt) -e . >&2
    echo "$wanted" >"$folder/trains"
fi
echo "$vllm"

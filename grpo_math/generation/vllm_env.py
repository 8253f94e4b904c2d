"""The versions of vLLM that a run needs, and where, and an environment for a server.

A server has a separate environment, because vLLM pins other versions than training needs.

pip's own variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS ...) choose where packages come from.
"""

import platform
import subprocess
import sys
from pathlib import Path

from packaging.version import Version

from grpo_math.errors import UserError
from grpo_math.settings.run_settings import RunSettings

SUPPORTED = ">=0.22,<0.33"  # versions that serve adapters
TRL_SUPPORTED = ">=0.22,<0.32"  # versions that TRL 1.16 supports: for whole weights, and in the training process
PLUGIN = "vllm-bnb-plugin"  # bitsandbytes for vLLM, whose own support ended with 0.27
GLIBC = {"x86_64": "2.31", "aarch64": "2.34"}  # the oldest that vLLM's packages are built for


def needed_in_training(settings: RunSettings) -> list[str]:
    """Return the packages that the environment of training needs for vLLM.

    TRL imports vLLM to send whole weights to a server. A server that gets adapters has a separate environment.

    >>> lora = RunSettings({"use_vllm": True, "vllm_mode": "server", "use_peft": True, "load_in_4bit": True})
    >>> needed_in_training(lora), needed_in_training(lora.changed(vllm_mode="colocate"))
    ([], ['vllm', 'vllm-bnb-plugin'])
    >>> needed_in_training(lora.changed(vllm_sync="merged"))
    ['vllm']
    """
    if settings.generation == "colocate":
        return ["vllm", *[PLUGIN] * settings.load_in_4bit]
    return ["vllm"] if settings.generation == "server" and not settings.sends_adapter else []


def supported(settings: RunSettings) -> str:
    """Return the versions of vLLM that can serve a run."""
    return TRL_SUPPORTED if needed_in_training(settings) else SUPPORTED


def make(folder: str | Path) -> Path:
    """Make an environment for a server of any recipe on a GPU, and return the path of its ``vllm``.

    An environment that was made for these versions is used again.
    """
    folder = Path(folder).absolute()
    packages = [f"vllm{TRL_SUPPORTED}", PLUGIN]
    ready, versions = folder / "ready", f"{', '.join(packages)}\n"
    if not ready.exists() or ready.read_text() != versions:
        _refuse_old_glibc()
        print(
            f"Making the environment {folder} for the vLLM server (once; about 4 GB to download) ...", file=sys.stderr
        )
        ready.unlink(missing_ok=True)
        if not (folder / "bin/python").exists():
            _run(sys.executable, "-m", "venv", str(folder))
        _run(str(folder / "bin/python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "install", *packages)
        ready.write_text(versions)
    return folder / "bin/vllm"


def _refuse_old_glibc() -> None:
    """Raise `UserError` if pip would find only old versions of vLLM, or try to build one."""
    library, version = platform.libc_ver()
    needed = GLIBC.get(platform.machine(), "0")
    if library != "glibc" or Version(version) < Version(needed):
        found = f"{library} {version}".strip() or platform.system()
        raise UserError(f"vLLM needs glibc {needed} or newer, and this machine has {found}: use a newer Linux or image")


def _run(*command: str) -> None:
    """Run a command with its output on stderr: stdout is only for the path."""
    if subprocess.run(command, stdout=sys.stderr).returncode:
        raise UserError(f"the environment for vLLM was not made: {' '.join(command[1:5])} failed, see above")

"""Speed-ups that are off although the settings ask for them: each reason is one line on the console.

The same reasons are in ``switched_off.json`` of the run directory and on the page of `grpo-math report`.

``vllm_share_weights`` and ``staleness`` are not switched off: they refuse a run that they do not support.
"""

import logging
import os
from pathlib import Path

from grpo_math.run.files import write_json

FILE = "switched_off.json"
# Name -> what a run does without the speed-up.
SPEED_UPS = {
    "shared prefill": "each prompt is computed for every completion, and finished rows to the end of the batch",
    "shared prefix": "the common beginning of the prompts is computed for each prompt",
    "packing": "rows are scored unpacked",
    "shared updates": "an update keeps TRL's micro-batches, and shares prompts only within them",
    "varlen kernel": "attention is one call for each sequence",
    "adapter sync": "each sync sends all weights to vLLM",
    "prefetch": "training waits for the samples of this batch",
    "tiled MLP": "each MLP is computed over all tokens at once",
}
logger = logging.getLogger(__name__)
_reasons: dict[str, list[str]] = {}  # of this process's last trainer


def switched_off(name: str, reason: str) -> None:
    """Log once that a speed-up of `SPEED_UPS` is off, and remember the reason for the run directory."""
    known = _reasons.setdefault(name, [])
    if reason not in known:
        known.append(reason)
        if os.environ.get("RANK", "0") == "0":
            logger.warning(f"Switched off: {name}: {reason}; {SPEED_UPS[name]}.")


def forget() -> None:
    """Forget the reasons of an earlier trainer in this process."""
    _reasons.clear()


def write(run_dir: Path) -> None:
    """Write the reasons so far, or remove those of an earlier run."""
    if _reasons:
        write_json(run_dir / FILE, {"switched_off": _reasons})
    else:
        (run_dir / FILE).unlink(missing_ok=True)

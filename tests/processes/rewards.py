"""Rewards for runs of the real training program. Each rank also writes down a hash of its weights when it saves them.

The hash goes to the folder WEIGHTS_FOLDER, one file a rank: whether ranks agree can only be seen on the ranks.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from grpo_math.trainer.trainer import MathGRPOTrainer


def letters(completions, **columns):
    """Differs within a group, and needs no answer that is right."""
    return [float(sum(map(ord, str(completion))) % 7) for completion in completions]


save_model = MathGRPOTrainer.save_model


def save_and_tell(trainer, *args, **kwargs):
    accelerator = trainer.accelerator
    weights = b"".join(p.detach().float().numpy().tobytes() for p in trainer.model.parameters())
    about = f"{accelerator.distributed_type} {accelerator.num_processes} {hashlib.sha256(weights).hexdigest()}"
    (Path(os.environ["WEIGHTS_FOLDER"]) / f"rank{accelerator.process_index}").write_text(about)
    return save_model(trainer, *args, **kwargs)


if "WEIGHTS_FOLDER" in os.environ:
    MathGRPOTrainer.save_model = save_and_tell

"""Prepare wandb and trackio: wandb's environment before it starts, and the resolved settings of the recipe. TRL's and
transformers' own callbacks log every metric and completion."""

import json
import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from grpo_math.checks.check_services import wandb_offline
from grpo_math.redact import without_secrets

# wandb would upload a record of the machine with the command line, which may contain a token, and everything that the
# run prints.
WANDB = {
    "WANDB_X_DISABLE_META": "true",
    "WANDB_DISABLE_GIT": "true",
    "WANDB_CONSOLE": "off",
    "WANDB_INIT_TIMEOUT": "60",
}


class Trackers(TrainerCallback):
    """Log the settings to wandb and trackio. Made on the main process, before training.

    >>> Trackers(["tensorboard"], Path("runs/x"), {"hub_token": "hf_x", "seed": 1}).settings
    {'seed': 1}
    """

    def __init__(self, names: str | Collection[str] | None, run_dir: Path, settings: Mapping[str, Any]) -> None:
        self.names = names or ()
        self.settings = json.loads(json.dumps(without_secrets(settings), default=str))
        if "wandb" in self.names:
            # The user's own variables win, so they come last.
            os.environ.update(
                {**WANDB, "WANDB_PROJECT": str(settings.get("project")), "WANDB_DIR": str(run_dir), **os.environ}
            )
            if why := wandb_offline():
                # wandb would ask for a key on the terminal, or wait for its server.
                os.environ.setdefault("WANDB_MODE", "offline")
                print(f"wandb    offline ({why}); later: wandb sync", file=sys.stderr)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the settings after the callbacks of transformers, so that these stay."""
        if "wandb" in self.names:
            import wandb

            # transformers' callback has logged some of these names. wandb refuses to change them without this argument.
            wandb.config.update(self.settings, allow_val_change=True)
        if "trackio" in self.names:
            import trackio

            trackio.config.update(self.settings)

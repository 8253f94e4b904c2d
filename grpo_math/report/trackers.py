"""What wandb and trackio are told beside TRL's own: the resolved settings at the start, plots and findings at the end.

TRL tells them every metric of a step, as ``train/NAME``, and the table of completions. wandb without a key, or with no
way to its server, keeps the run offline in the run directory; the line that uploads it later is printed. It is never
left to ask on the terminal, and what a tracker cannot do ends no run. Of the other names of ``report_to`` transformers
alone takes care.

Does not log a step: TRL does, and run/log.py what TRL does not know.
"""

import json
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from grpo_math.checks import Finding
from grpo_math.checks.services import wandb_offline
from grpo_math.run import metrics
from grpo_math.run.redact import one_line, secret_values, without_secrets

INIT_SECONDS, FINISH_SECONDS = 60.0, 300.0  # that wandb may take to start, and to upload what is left at the end


class Trackers(TrainerCallback):
    """Made on the main process, before training; ``end`` is called with the report. What a tracker raises is a line on
    stderr.

    >>> Trackers(["tensorboard"], Path("runs/x"), {"hub_token": "hf_x", "seed": 1}).settings
    {'seed': 1}
    """

    def __init__(self, names: str | Collection[str] | None, run_dir: Path, settings: Mapping[str, Any]) -> None:
        self.settings = without_secrets(settings)
        self.later = ""  # the command that uploads an offline run
        self.trackio: Any = None  # the run
        self.names = [name for name in ("wandb", "trackio") if name in (names or ())]
        if "wandb" in self.names:
            _safely("wandb", lambda: self._start_wandb(run_dir))

    def _start_wandb(self, run_dir: Path) -> None:
        """The run that transformers' callback will find. Its own record of the machine would hold the command line."""
        import wandb

        why = wandb_offline()
        asked = os.environ.get("WANDB_MODE", "").lower()
        mode: Any = "disabled" if asked == "disabled" else "offline" if why else None
        folder = Path(os.environ.get("WANDB_DIR") or run_dir)
        project, name = os.environ.get("WANDB_PROJECT") or self.settings["project"], self.settings.get("run_name")
        common: dict[str, Any] = {"project": project, "name": name or run_dir.name, "dir": folder}
        still: dict[str, Any] = {"silent": True, "console": "off", "disable_git": True, "x_disable_meta": True}
        waits: dict[str, Any] = {"init_timeout": INIT_SECONDS, "finish_timeout": FINISH_SECONDS}
        try:
            wandb.init(**common, mode=mode, settings=wandb.Settings(**still, **waits))
        except Exception as error:  # a key that is refused, a server that is another's
            why = f"wandb answers: {one_line(error, secret_values(os.environ))}"
            wandb.init(**common, mode="offline", settings=wandb.Settings(**still))
        run = wandb.run
        if run is not None and run.offline:
            os.environ["WANDB_MODE"] = "offline"
            self.later = f"wandb sync {os.path.relpath(Path(run.dir).parent)}"
            print(f"wandb    offline ({why}); later: {self.later}", file=sys.stderr)
        elif run is not None and run.url:
            print(f"wandb    {run.url}", file=sys.stderr)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the callbacks of transformers, so that these settings are the ones that stay."""
        if "wandb" in self.names:
            _safely("wandb", self._wandb_settings)
        if "trackio" in self.names:
            _safely("trackio", self._trackio_settings)

    def _wandb_settings(self) -> None:
        import wandb

        wandb.config.update(self.settings, allow_val_change=True)

    def _trackio_settings(self) -> None:
        import trackio

        trackio.config.update(json.loads(json.dumps(self.settings, default=str)))
        self.trackio = trackio.context_vars.current_run.get()

    def end(self, plots: Sequence[Path], findings: Sequence[Finding]) -> None:
        """The plots as ``plots/NAME``, every finding as ``train/findings/NAME``; closes the trackers."""
        told = {f"train/{metrics.FINDING_PREFIX}{finding.check}": finding.line() for finding in findings}
        if "wandb" in self.names:
            _safely("wandb", lambda: self._end_wandb(plots, told))
        if self.trackio:
            _safely("trackio", lambda: self._end_trackio(plots, told))
        if self.later:
            print(f"wandb    {self.later}")

    def _end_wandb(self, plots: Sequence[Path], told: dict[str, str]) -> None:
        import wandb

        if wandb.run is not None:
            wandb.log({**told, **{f"plots/{plot.stem}": wandb.Image(str(plot)) for plot in plots}})
            wandb.finish()

    def _end_trackio(self, plots: Sequence[Path], told: dict[str, str]) -> None:
        """transformers' callback has closed the run with training: it is opened once more."""
        import trackio

        run = self.trackio
        settings = {name: value for name, value in run.config.items() if not name.startswith("_")}  # it is written anew
        trackio.init(
            project=run.project,
            name=run.name,
            resume="must",
            embed=False,
            config=settings,
            space_id=self.settings.get("trackio_space_id"),
            bucket_id=self.settings.get("trackio_bucket_id"),
            private=self.settings.get("hub_private_repo"),
        )
        trackio.log({**told, **{f"plots/{plot.stem}": trackio.Image(str(plot)) for plot in plots}})
        trackio.finish()


def _safely(name: str, do: Callable[[], None]) -> None:
    """A tracker that fails costs its figures and not the run."""
    try:
        do()
    except Exception as error:
        said = one_line(error, secret_values(os.environ))
        print(f"{name:<8} failed, and the run goes on: {said}", file=sys.stderr)

"""`RunSettings`: every setting of a run, built once from a recipe and a command line, and read by attribute.

>>> settings = RunSettings({"use_vllm": True, "vllm_mode": "server", "use_peft": True})
>>> settings.generation, settings.sends_adapter, settings.beta, sorted(settings.explicit)
('server', True, 0.0, ['use_peft', 'use_vllm', 'vllm_mode'])
>>> settings.starts_server, settings.changed(vllm_server_host="node1").external_server
(True, 'node1')
>>> settings.beta = 1.0
Traceback (most recent call last):
...
AttributeError: settings do not change: use changed(beta=...)
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from grpo_math.settings.fields import defaults
from grpo_math.settings.own import ProgramFields, TrainerFields
from grpo_math.settings.trl_types import ModelConfig


class RunSettings(ProgramFields, TrainerFields, ModelConfig):
    """Every setting of a run. ``explicit``: the fields of the recipe and the command line; the others have defaults.

    The facts of one topic are properties of its dataclass. Here are those that follow from several topics.
    """

    explicit: frozenset[str]
    # settings/recipe.py refuses null for these.
    max_completion_length: int
    num_generations: int

    def __init__(self, explicit: Mapping[str, Any]) -> None:
        # Copies of the lists among the defaults, which all settings would share.
        vars(self).update({**deepcopy(defaults()), **explicit, "explicit": frozenset(explicit)})

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"settings do not change: use changed({name}=...)")

    def changed(self, **fields: Any) -> "RunSettings":
        """Return the settings with other values, which count as explicit."""
        return self.derived(**fields, explicit=self.explicit | fields.keys())

    def derived(self, **fields: Any) -> "RunSettings":
        """Return the settings with values that follow from others."""
        copied = object.__new__(RunSettings)
        vars(copied).update(vars(self) | fields)
        return copied

    def values(self) -> dict[str, Any]:
        """Return every field by its name."""
        return {name: value for name, value in vars(self).items() if name != "explicit"}

    def explicit_values(self) -> dict[str, Any]:
        """Return the fields that the user set."""
        return {name: getattr(self, name) for name in self.explicit}

    def requested(self, name: str) -> Any:
        """Return an explicit value, or None for a default."""
        return getattr(self, name) if name in self.explicit else None

    @property
    def evaluates(self) -> bool:
        """Return True if a run evaluates during training."""
        return bool(self.heldout_every or self.eval_on_start or self.eval_strategy != "no")

    @property
    def keeps_best(self) -> bool:
        """Return True if a run keeps its best checkpoint: it evaluates and saves during training."""
        return self.keep_best and self.evaluates and self.save_strategy != "no"

    @property
    def evaluates_default_set(self) -> bool:
        """Return True if a run evaluates problems of ``eval_dataset`` during training, because ``heldout`` is empty."""
        return self.evaluates and not self.heldout

    @property
    def needing_whole(self) -> list[str]:
        """Return the settings that generate with the model, and so need the whole model on each process unless vLLM
        samples. Without vLLM they do not work with ZeRO-3 or FSDP."""
        names = () if self.use_vllm else ("eval_n", "heldout_every", "eval_strategy", "eval_on_start")
        return [name for name in names if getattr(self, name) not in (None, 0, "no")]

    @property
    def sends_adapter(self) -> bool:
        """Return True if only the adapter is sent to the vLLM server. Otherwise TRL sends all weights over NCCL."""
        return self.use_peft and self.vllm_sync == "adapter"

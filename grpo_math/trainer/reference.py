"""The reference of the KL term becomes the current policy every N optimizer steps.

This is the outer loop of iterative GRPO (arXiv:2402.03300, algorithm 1): pi_ref <- pi_theta, after which the KL term
beta * KL(pi_theta || pi_ref) starts again at zero (with dropout, and by rounding in bfloat16, a little above it). With
full fine-tuning the reference is the model that TRL holds beside the policy. With an adapter it is a frozen second
adapter called ``ref``, which TRL scores in place of the bare base model where it finds one; the base weights are never
touched.

Works with one process, DDP and every stage of DeepSpeed ZeRO. Does not score anything, and does not mix two models
(TRL's ``sync_ref_model`` does).
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import TrainerCallback

from grpo_math.errors import ConfigError

POLICY, REFERENCE = "default", "ref"  # the names of the adapters, as TRL has them
# In a checkpoint: the reference as of the last refresh. In a folder of its own, since servers such as vLLM take every
# safetensors file that lies beside config.json for weights of the model.
FILE = "reference/weights.safetensors"


class Reference(TrainerCallback):
    """The reference of a policy, made equal to it after every ``steps`` optimizer steps.

    ``policy`` is not wrapped by DDP or DeepSpeed; ``model`` is the reference model beside it, or None if ``policy`` is
    a `PeftModel`, which then gets the adapter ``ref``, a copy of its own as it is now.

    >>> policy, model = nn.Linear(2, 1), nn.Linear(2, 1)
    >>> Reference(policy, model, steps=100).refresh()
    >>> torch.equal(model.weight, policy.weight)
    True

    Raises `ConfigError` for an adapter that cannot stand beside a copy of itself: a LoRA with a trained bias or with
    layer_replication, prompt learning, and any whose trained weights are shared between adapters.
    """

    def __init__(self, policy: nn.Module, model: nn.Module | None, steps: int) -> None:
        self.policy, self.model, self.steps = policy, model, steps
        # TRL scores the reference by switching to an adapter called "ref" where the model has one.
        if model is None:
            add_reference_adapter(policy, steps)
            self.refresh()  # TRL's own copy of an adapter that was there before leaves embeddings out

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.steps == 0:
            self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy every weight of the policy that the reference does not share with it."""
        for _, source, target in self._pairs():
            with _whole([source, target], writes=True):
                target.copy_(source)

    def save(self, folder: Path, writes: bool = True) -> None:
        """The reference into ``folder``. Every rank calls this, and those with ``writes`` leave the file."""
        tensors = {}
        for name, _, target in self._pairs():
            with _whole([target], writes=False):
                if writes:
                    tensors[name] = target.detach().to("cpu", copy=True).contiguous()
        if writes:
            (folder / FILE).parent.mkdir(exist_ok=True)
            save_file(tensors, folder / FILE, metadata={"format": "pt"})

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """The reference from ``folder``, on every rank."""
        if not (folder / FILE).exists():
            reason = f"cannot go on from {folder}, a checkpoint of a run that never refreshed its reference"
            raise ConfigError("reference_refresh_steps", self.steps, reason, "leave it at 0")
        with safe_open(folder / FILE, framework="pt") as file:
            for name, _, target in self._pairs():
                with _whole([target], writes=True):
                    target.copy_(file.get_tensor(name))

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """In this context the policy's `save_pretrained` writes the trained adapter and no folder ``ref`` beside it."""
        policy: Any = self.policy
        if self.model is None:
            policy.save_pretrained = partial(policy.save_pretrained, selected_adapters=[POLICY])
        try:
            yield
        finally:
            policy.__dict__.pop("save_pretrained", None)

    def _pairs(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """(name in the reference, the policy's parameter, the reference's) of all that the two do not share."""
        if self.model is None:
            return _adapter_pairs(self.policy)
        targets = dict(self.model.named_parameters())
        return ((name, source, targets[name]) for name, source in self.policy.named_parameters())


def follow(trainer: Any, steps: int) -> Reference:
    """The reference of a trainer's policy, which it refreshes from now on."""
    bare = trainer.accelerator.unwrap_model
    model = trainer.ref_model and bare(trainer.ref_model, keep_torch_compile=False)
    reference = Reference(bare(trainer.model, keep_torch_compile=False), model, steps)
    trainer.add_callback(reference)
    return reference


def refuse_lost_reference(folder: Path) -> None:
    """A run that does not refresh its reference cannot go on where one that does has stopped."""
    if (folder / FILE).exists():
        reason = f"would lose the refreshed reference of {folder}"
        raise ConfigError("reference_refresh_steps", 0, reason, "give the value that the run had")


def add_reference_adapter(policy: Any, steps: int) -> None:
    """Give a `PeftModel` the frozen adapter ``ref``, shaped as its trained one; the weights are copied elsewhere.

    Draws no random number from the generators that the run uses, and leaves what is trainable as it is.
    """
    config = deepcopy(policy.peft_config[POLICY])
    for kind, applies in (
        ("prompt learning", config.is_prompt_learning),
        ("a LoRA with a trained bias", getattr(config, "bias", "none") != "none"),
        ("a LoRA with layer_replication", getattr(config, "layer_replication", None)),
    ):
        if applies:
            raise ConfigError("reference_refresh_steps", steps, f"cannot copy {kind}", "leave it at 0")
    if REFERENCE not in policy.peft_config:
        config.inference_mode = True
        if hasattr(config, "init_lora_weights"):
            config.init_lora_weights = True  # PiSSA and its like would change the base weights a second time
        device = next(policy.parameters()).device
        # The weights of a new adapter are random: the run's own generators must not notice.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            policy.add_adapter(REFERENCE, config)
    pairs = list(_adapter_pairs(policy))
    copied = {id(source) for _, source, _ in pairs}
    shared = [name for name, p in policy.named_parameters() if p.requires_grad and id(p) not in copied]
    if shared:
        raise ConfigError("reference_refresh_steps", steps, f"cannot copy the trained {shared[0]}", "leave it at 0")
    for _, source, target in pairs:
        target.requires_grad_(False)
        if target.dtype != source.dtype:
            target.data = target.data.to(source.dtype)


def _adapter_pairs(policy: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
    parameters = dict(policy.named_parameters())
    for name, source in parameters.items():
        other = ".".join(REFERENCE if part == POLICY else part for part in name.split("."))
        if other != name and other in parameters:
            yield other, source, parameters[other]


def _whole(parameters: list[nn.Parameter], writes: bool) -> Any:
    """A context in which parameters that ZeRO-3 has split are whole; what rank 0 writes to them stays."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return nullcontext()
    zero: Any = import_module("deepspeed").zero
    return zero.GatheredParameters(parameters, modifier_rank=0 if writes else None)

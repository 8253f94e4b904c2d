"""Refresh the reference of the KL term: every N optimizer steps it becomes the current policy. Save and load it.

This is the outer loop of iterative GRPO (arXiv:2402.03300, algorithm 1): pi_ref <- pi_theta, after which the KL term
beta * KL(pi_theta || pi_ref) starts again at zero (with dropout, and by rounding in bfloat16, a little above it). With
full fine-tuning the reference is TRL's second model. With an adapter it is a frozen second adapter called ``ref``,
which TRL scores instead of the base model; the base weights never change.

Works with one process, DDP and every stage of DeepSpeed ZeRO. Does not score anything, and does not mix two models
(TRL's ``sync_ref_model`` does).
"""

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import TrainerCallback

from grpo_math.errors import ConfigError
from grpo_math.generation.adapters import ADAPTER

REFERENCE = "ref"  # the adapter that TRL takes as the reference
# In a separate folder of a checkpoint, because servers such as vLLM load every safetensors file next to config.json as
# weights of the model.
FILE = "reference/weights.safetensors"


class Reference(TrainerCallback):
    """Copies a policy to its reference after every ``steps`` optimizer steps.

    ``policy`` is not wrapped by DDP, DeepSpeed or torch.compile, which rename the parameters; pairs are found by name.
    ``model`` is the reference model, or None if ``policy`` is a `PeftModel`, which then gets the adapter ``ref``, a
    copy of its current adapter. With ``steps`` 0 nothing is copied: TRL's ``sync_ref_model`` moves the reference, which
    is saved and loaded here.

    >>> policy, model = nn.Linear(2, 1), nn.Linear(2, 1)
    >>> Reference(policy, model, steps=100).refresh()
    >>> torch.equal(model.weight, policy.weight)
    True

    Raises `ConfigError` for an adapter that cannot be copied: a LoRA with a trained bias or with layer_replication,
    prompt learning, and any other whose trained weights are shared between adapters.
    """

    def __init__(self, policy: nn.Module, model: nn.Module | None, steps: int) -> None:
        self.policy = policy
        self.model = model
        self.steps = steps
        if model is None:
            add_reference_adapter(policy, steps)
            # If TRL has copied an existing adapter, the copy lacks trained embeddings.
            self.refresh()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.steps and state.global_step % self.steps == 0:
            self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy every weight of the policy that the reference does not share with it."""
        # One pair at a time, so that ZeRO-3 gathers only two parameters at once.
        for _, source, target in self._pairs():
            with _gathered([source, target], writes=True):
                target.copy_(source)

    def save(self, folder: Path, writes: bool) -> None:
        """Save the reference. Every rank calls this, because ZeRO-3 gathers; only ranks with ``writes`` write."""
        tensors = {}
        for name, _, target in self._pairs():
            with _gathered([target], writes=False):
                if writes:
                    # A copy, because ZeRO-3 frees the gathered parameter after this context.
                    tensors[name] = target.detach().to("cpu", copy=True).contiguous()
        if writes:
            (folder / FILE).parent.mkdir(exist_ok=True)
            save_file(tensors, folder / FILE, metadata={"format": "pt"})

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Load the reference, on every rank."""
        if not (folder / FILE).exists():
            name, value = ("reference_refresh_steps", self.steps) if self.steps else ("sync_ref_model", True)
            raise ConfigError(
                name,
                value,
                f"cannot continue from {folder}, a checkpoint without a reference that has moved",
                "leave it out",
            )
        with safe_open(folder / FILE, framework="pt") as file:
            for name, _, target in self._pairs():
                with _gathered([target], writes=True):
                    target.copy_(file.get_tensor(name))

    def _pairs(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """Yield (name in the reference, policy's parameter, reference's parameter) for each unshared parameter."""
        if self.model is None:
            return _adapter_pairs(self.policy)
        targets = dict(self.model.named_parameters())
        return ((name, source, targets[name]) for name, source in self.policy.named_parameters())


def remove_reference(policy: Any, folder: Path) -> None:
    """Remove the adapter ``ref`` from a saved policy, because peft saves all adapters of a model.

    A run that resumes makes it again from the adapter that it began with. transformers 5.17 would load ``ref`` alone.
    """
    if REFERENCE in getattr(policy, "peft_config", {}):
        shutil.rmtree(folder / REFERENCE, ignore_errors=True)


def refuse_lost_reference(folder: Path) -> None:
    """Raise `ConfigError` if a run whose reference does not move resumes from a checkpoint with a moved reference."""
    if (folder / FILE).exists():
        raise ConfigError(
            "reference_refresh_steps",
            0,
            f"would lose the moved reference of {folder}",
            "give the value that the run had, or sync_ref_model: true if the run had that",
        )


def add_reference_adapter(policy: Any, steps: int) -> None:
    """Add the frozen adapter ``ref`` to a `PeftModel`, with the shapes of the trained one. Does not copy weights.

    Does not use the run's random numbers, and does not change which parameters are trainable.
    """
    config = deepcopy(policy.peft_config[ADAPTER])
    for kind, applies in (
        ("prompt learning", config.is_prompt_learning),
        ("a LoRA with a trained bias", getattr(config, "bias", "none") != "none"),
        ("a LoRA with layer_replication", getattr(config, "layer_replication", None)),
    ):
        if applies:
            raise ConfigError("reference_refresh_steps", steps, f"cannot copy {kind}", "leave it at 0")
    # TRL adds ``ref`` itself if the model came with an adapter.
    if REFERENCE not in policy.peft_config:
        config.inference_mode = True
        if hasattr(config, "init_lora_weights"):
            # PiSSA and similar methods would change the base weights a second time.
            config.init_lora_weights = True
        device = next(policy.parameters()).device
        # The weights of a new adapter are random. They must not use the run's random numbers.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            policy.add_adapter(REFERENCE, config)
    pairs = list(_adapter_pairs(policy))
    copied = {id(source) for _, source, _ in pairs}
    shared = [name for name, p in policy.named_parameters() if p.requires_grad and id(p) not in copied]
    if shared:
        raise ConfigError("reference_refresh_steps", steps, f"cannot copy the trained {shared[0]}", "leave it at 0")
    for _, source, target in pairs:
        target.requires_grad_(False)
        # peft creates an adapter in float32. TRL casts the trained one to bfloat16 if the base is quantized.
        if target.dtype != source.dtype:
            target.data = target.data.to(source.dtype)


def _adapter_pairs(policy: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
    parameters = dict(policy.named_parameters())
    for name, source in parameters.items():
        other = ".".join(REFERENCE if part == ADAPTER else part for part in name.split("."))
        if other != name and other in parameters:
            yield other, source, parameters[other]


def _gathered(parameters: list[nn.Parameter], writes: bool) -> Any:
    """Return a context in which ZeRO-3's split parameters are whole. It keeps what rank 0 writes to them."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return nullcontext()
    return import_module("deepspeed").zero.GatheredParameters(parameters, modifier_rank=0 if writes else None)

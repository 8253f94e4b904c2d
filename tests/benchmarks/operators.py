"""Operators and waits of a decoded token, of a micro-batch and of an optimizer step, next to those of stock TRL.

    python tests/benchmarks/operators.py

They are counted on the pretended GPU of tests/gpu_like (it needs g++ and torch's CPU build): a random model of
Qwen2.5-1.5B's depth and of small widths, in bfloat16, with a LoRA of all maps. An operator launches about one kernel,
and views launch none. At a wait the CPU stops until the GPU is done. A token is one of 8 rows that are sampled; a
micro-batch and a step have the recorded rollout of update_phase.py, with gradient checkpointing.

Does not measure time, nor the kernels that torch's own operators launch.
"""

import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu_like.device import load

if __name__ == "__main__":  # before torch looks for a GPU
    load()

import torch
from benchmarks.update_phase import GROUP, OURS, Contestant, Shape, rollout
from gpu_like import counting, tensors
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import set_verbosity_error
from trl import GRPOConfig, GRPOTrainer

from grpo_math import MathGRPOTrainer
from grpo_math.generation.decoding import lean_generation

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "num_hidden_layers": 28, "vocab_size": 512}
SHAPE = Shape(prompt=16, longest=32, mean=1 / 3)
# They give a tensor another shape, or make one without values.
VIEWS = {
    *("view", "_unsafe_view", "transpose", "t", "slice", "unsqueeze", "expand", "select", "permute", "alias", "detach"),
    *("split", "squeeze", "as_strided", "empty", "empty_strided", "empty_like", "new_empty", "lift_fresh"),
    *("split_with_sizes", "unbind"),
}


class Counts(NamedTuple):
    """``passes``: how often the model is called, which embeds tokens once."""

    operators: float
    waits: float
    passes: float

    def a_pass(self, other: "Counts") -> "Counts":
        """Return what each pass more than those of ``other`` takes."""
        more = self.passes - other.passes
        return Counts(*((mine - theirs) / more for mine, theirs in zip(self, other, strict=True)))


def counted(action: Callable[[], Any]) -> Counts:
    operators: list[str] = []
    tensors.heard = lambda func, *_: operators.append(func._schema.name.removeprefix("aten::"))
    with counting.counting() as waits:
        action()
    return Counts(sum(name not in VIEWS for name in operators), waits.total(), operators.count("embedding"))


class Heard(TorchDispatchMode):
    """Counts operators on the CPU, as the pretended GPU counts its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors.heard(func, args, None)
        return func(*args, **(kwargs or {}))


def model() -> Any:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES)).to(torch.bfloat16)


def token(context: Callable[[Any], Any], device: str) -> Counts:
    """Count what a token more takes, with transformers' own generation or ours."""
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    policy: Any = get_peft_model(model(), lora).to(device).eval()
    ids = torch.randint(5, 500, (GROUP, 20), device=device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def sample(tokens: int) -> None:
        with torch.no_grad(), context(policy), Heard() if device == "cpu" else nullcontext():
            policy.generate(**inputs, max_new_tokens=tokens, eos_token_id=None, do_sample=True, top_k=0, pad_token_id=0)

    short, long = (counted(partial(sample, tokens)) for tokens in (8, 16))
    return long.a_pass(short)


def update(kind: Any, config: Any) -> tuple[Counts, Counts]:
    """Count what a micro-batch takes, and an optimizer step."""
    steps = []
    for groups in (2, 4):
        shape = SHAPE._replace(groups=groups)
        with tempfile.TemporaryDirectory() as folder:
            contestant = Contestant(kind, config, shape, model(), 4, folder)
            batch = rollout(shape, SIZES["vocab_size"])
            contestant.step(batch)
            steps.append(counted(partial(contestant.step, batch)))
    return steps[1].a_pass(steps[0]), steps[1]


def print_row(name: str, trl: Counts, ours: Counts) -> None:
    operators, waits = (f"{getattr(trl, key):g} / {getattr(ours, key):g}" for key in ("operators", "waits"))
    print(f"|{name}|{operators}|{trl.operators / ours.operators:.2f}x|{waits}|", flush=True)


def main() -> None:
    set_verbosity_error()
    print("|one of|operators: TRL's / ours|ratio|waits: TRL's / ours|\n|---|---|---|---|", flush=True)
    tokens = []
    for context in (lambda policy: nullcontext(), lean_generation):
        # The pretended GPU has no plain parameters, and no other LoRA is folded.
        waits = token(context, "cuda").waits
        tokens.append(token(context, "cpu")._replace(waits=waits))
    print_row("decoded token", *tokens)
    trl, ours = update(GRPOTrainer, GRPOConfig), update(MathGRPOTrainer, OURS)
    print_row("micro-batch", trl[0], ours[0])
    print_row("optimizer step", trl[1], ours[1])


if __name__ == "__main__":
    main()

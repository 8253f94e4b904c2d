"""The machine of a run, and its largest micro-batch."""

from typing import NamedTuple

from grpo_math.packing.row_plan import MAX_TILES, MIN_TOKENS, largest_micro_batch
from grpo_math.planner.model import Shape
from grpo_math.planner.settings import LaunchSettings
from grpo_math.settings.batch import Batch
from grpo_math.settings.run_settings import RunSettings


class Machine(NamedTuple):
    """The model and the machine, which stay the same while settings are varied."""

    shape: Shape
    gpus: int
    gpu_bytes: int
    cpu_bytes: int
    prompt: int  # tokens of the longest prompt
    accelerate: LaunchSettings | None
    capability: float | None = None  # the compute capability of a GPU, if known
    teacher: Shape | None = None  # of reference_model
    family: str = ""  # the model's ``model_type``


class Work(NamedTuple):
    """A micro-batch. ``groups``: for each prompt, its tokens without the last, and the lengths of its completions."""

    # The last prompt token opens each completion, and is not part of the prompt (packing/pack.py).
    groups: list[tuple[int, list[int]]]
    tiles: int = 1  # number of token tiles of an MLP

    @property
    def scored(self) -> int:
        return sum(sum(lengths) for _, lengths in self.groups)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return the factors of a measurement: 1, tokens, gathered keys.

        >>> Work([(2, [4, 4])]).sizes  # 2 + 4 + 4 tokens
        (1, 10, 14)
        """
        tokens = self.scored + sum(prompt for prompt, _ in self.groups)
        # Attention gathers the prompt's keys once for the prompt, and again for each completion (packing/varlen.py).
        return 1, tokens, tokens + sum(prompt * len(lengths) for prompt, lengths in self.groups)


def tiles(shape: Shape, settings: RunSettings, tokens: int) -> int:
    """Return the number of token tiles in which trainer/tiled_mlp.py computes an MLP."""
    # tiled_mlp.py does not tile layers with DoRA, nor in updates without checkpointing, where each tile would keep its
    # tensors.
    untiled = settings.use_dora or not settings.gradient_checkpointing
    return max(1, min(MAX_TILES, tokens // MIN_TOKENS)) if shape.tiled and not untiled else 1


def splits(settings: RunSettings) -> bool:
    """Return True if training splits a micro-batch by a token budget."""
    return not (settings.router_aux_loss_coef or settings.needs_whole_micro_batches)


def largest(machine: Machine, settings: RunSettings, batch: Batch, zero_stage: int) -> Work:
    """Return the largest micro-batch that the trainer can make: completions of full length, up to the token budget.

    The budget is ``max_tokens_per_micro_batch``, or the size of TRL's padded micro-batch: rows x (prompt + completion).
    A group that does not fit is split, and each part contains the prompt. A micro-batch has at least one completion.

    Eight completions of 100 tokens for each of four prompts of 100 tokens. Eight padded rows have 1,600 tokens:

    >>> from types import SimpleNamespace
    >>> machine, batch = SimpleNamespace(shape=SimpleNamespace(tiled=True), prompt=100), Batch(8, 1, 8, 4, 32)
    >>> settings = RunSettings({"max_completion_length": 100, "num_generations": 8})
    >>> for budget in (0, 500, 50, 10**6):
    ...     work = largest(machine, settings.changed(max_tokens_per_micro_batch=budget), batch, zero_stage=0)
    ...     [(prompt, len(lengths), lengths[-1]) for prompt, lengths in work.groups], work.sizes[1], work.tiles
    ([(99, 8, 100), (99, 7, 2)], 1600, 1)
    ([(99, 5, 1)], 500, 1)
    ([(99, 1, 100)], 199, 1)
    ([(99, 8, 100), (99, 8, 100), (99, 8, 100), (99, 8, 100)], 3596, 3)

    An entropy bonus, and the auxiliary loss of a mixture of experts, need TRL's micro-batches:

    >>> whole = ({"entropy_coef": 0.1}, {"router_aux_loss_coef": 0.001})
    >>> small = settings.changed(max_tokens_per_micro_batch=500)
    >>> [largest(machine, small.changed(**one), batch, zero_stage=0).sizes[1] for one in whole]
    [1600, 1600]

    Under ZeRO-3 an MLP is not tiled:

    >>> largest(machine, settings.changed(max_tokens_per_micro_batch=10**6), batch, zero_stage=3).tiles
    1
    """
    length, group, prompt = settings.max_completion_length, settings.num_generations, machine.prompt
    budget = (splits(settings) and settings.max_tokens_per_micro_batch) or batch.rows * (prompt + length)
    full, last = largest_micro_batch(budget, prompt, length, group, batch.rows * batch.steps)
    lengths = [*[length] * full, *[last] * bool(last)]
    groups = [(prompt - 1, lengths[start : start + group]) for start in range(0, len(lengths), group)]
    work = Work(groups)
    # Under ZeRO-3 the weights are split among processes: tiled_mlp.py leaves such MLPs whole.
    return work._replace(tiles=tiles(machine.shape, settings, work.sizes[1])) if zero_stage < 3 else work

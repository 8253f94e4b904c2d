"""The batch of a run, and its largest micro-batch.

Does not count bytes: memory.py does.
"""

from typing import NamedTuple

from grpo_math.planner.model import Shape
from grpo_math.planner.settings import Settings
from grpo_math.settings.batch import Batch
from grpo_math.trainer.arrange import fill

ROOM = 64  # free tokens in decoding.py's cache after it grows
TILE, MOST_TILES = 1024, 4  # copied from trainer/tiled_mlp.py, which imports torch


class Run(NamedTuple):
    """The inputs of the memory plan besides the settings: the batch and the GPUs of the policy."""

    batch: Batch
    prompt: int
    gpu_bytes: int
    generation: str  # transformers, colocate or server


class Work(NamedTuple):
    """The largest micro-batch. ``groups``: for each prompt, of ``prompt`` tokens, the lengths of its completions."""

    prompt: int
    groups: list[list[int]]
    tiles: int = 1  # number of token tiles of an MLP

    @property
    def tokens(self) -> int:
        """Return the number of tokens: prompt - 1 tokens once per prompt, plus all completions."""
        # The last prompt token opens each completion, and is not part of the prompt (trainer/packing.py).
        return len(self.groups) * (self.prompt - 1) + self.scored

    @property
    def scored(self) -> int:
        return sum(map(sum, self.groups))

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return the factors of a measurement: 1, tokens, gathered keys.

        >>> Work(3, [[4, 4]]).sizes  # 2 + 4 + 4 tokens
        (1, 10, 14)
        """
        # Attention gathers the prompt's keys once for the prompt, and again for each completion (trainer/varlen.py).
        rows = sum(map(len, self.groups))
        return 1, self.tokens, (len(self.groups) + rows) * (self.prompt - 1) + self.scored


def tiles(shape: Shape, settings: Settings, tokens: int) -> int:
    """Return the number of token tiles in which trainer/tiled_mlp.py computes an MLP."""
    # tiled_mlp.py does not tile layers with DoRA or in 8 bit, nor in updates without checkpointing, where each tile
    # would keep its tensors.
    whole = settings["use_dora"] or settings["load_in_8bit"] or not settings["gradient_checkpointing"]
    return max(1, min(MOST_TILES, tokens // TILE)) if shape.tiled and not whole else 1


def work_of(shape: Shape, settings: Settings, run: Run, zero_stage: int = 0) -> Work:
    """Return the largest micro-batch that the trainer can make: completions of full length, up to the token budget.

    The budget is ``max_tokens_per_micro_batch``, or the size of TRL's padded micro-batch: rows x (prompt + completion).
    A group that does not fit is split, and each part contains the prompt. A micro-batch has at least one completion.
    """
    t, rows, group = settings["max_completion_length"], run.batch.rows, settings["num_generations"]
    budget = settings["max_tokens_per_micro_batch"] or rows * (run.prompt + t)
    full, last = fill(budget, run.prompt, t, group, rows * run.batch.steps)
    lengths = [*[t] * full, *[last] * bool(last)]
    groups = [lengths[start : start + group] for start in range(0, len(lengths), group)]
    work = Work(run.prompt, groups)
    # Under ZeRO-3 the weights are split among processes: tiled_mlp.py leaves such MLPs whole.
    return work._replace(tiles=tiles(shape, settings, work.tokens)) if zero_stage < 3 else work

"""The batch of a run, and its largest micro-batch.

Does not count bytes: memory.py does.
"""

from typing import Any, NamedTuple

from grpo_math.planner.model import Shape
from grpo_math.planner.settings import Settings
from grpo_math.trainer.arrange import fill

ROOM = 64  # free tokens in decoding.py's cache after it grows
TILE, MOST_TILES = 1024, 4  # copied from trainer/tiled_mlp.py, which imports torch


class Run(NamedTuple):
    """The inputs of the memory plan besides the settings: the GPUs of the policy and the batch."""

    processes: int
    rows: int  # per_device_train_batch_size, solved
    steps: int  # micro-batches of an optimizer step
    rollout: int  # completions generated at a time, by all processes
    prompt: int
    gpu_bytes: int
    generation: str  # transformers, colocate or server


class Work(NamedTuple):
    """The largest micro-batch: ``prompts`` of ``prompt`` tokens, ``rows`` completions of ``completion`` tokens, and one
    completion of ``last`` tokens that fills the micro-batch."""

    prompts: int
    rows: int
    prompt: int
    completion: int
    packed: bool
    last: int = 0
    tiles: int = 1  # number of token tiles of an MLP

    @property
    def tokens(self) -> int:
        """Return the number of tokens. Packed rows have prompt - 1 tokens once per prompt, plus all completions."""
        if self.packed:
            return self.prompts * (self.prompt - 1) + self.scored
        return self.rows * (self.prompt + self.completion)

    @property
    def scored(self) -> int:
        return self.rows * self.completion + self.last

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Return the packed row: for each prompt its tokens without the last, and the lengths of its completions."""
        lengths = [*[self.completion] * self.rows, *[self.last] * bool(self.last)]
        group = -(-len(lengths) // self.prompts)
        cut = [lengths[start : start + group] for start in range(0, len(lengths), group)]
        return [{"prompt": self.prompt - 1, "lengths": part} for part in cut]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return the factors of a measurement: 1, tokens, gathered keys.

        >>> Work(1, 2, 3, 4, packed=True).sizes  # 2 + 4 + 4 tokens
        (1, 10, 14)
        """
        prompts, rows = self.prompts * (self.prompt - 1), self.rows + bool(self.last)
        return 1, self.tokens, prompts + rows * (self.prompt - 1) + self.scored


def packs(shape: Shape, settings: Settings) -> bool:
    """Return True if the trainer packs. It does not pack with eager attention."""
    return bool(settings["pack_updates"]) and settings["attn_implementation"] != "eager" and shape.packs


def tiles(shape: Shape, settings: Settings, tokens: int) -> int:
    """Return the number of token tiles in which trainer/tiled_mlp.py computes an MLP."""
    whole = settings["use_dora"] or settings["load_in_8bit"] or not shape.tiled
    return 1 if whole else max(1, min(MOST_TILES, tokens // TILE))


def work_of(shape: Shape, settings: Settings, run: Run, zero_stage: int = 0) -> Work:
    """Return the largest micro-batch that the trainer can make: completions of full length, up to the token budget.

    The budget is ``max_tokens_per_micro_batch``, or the size of TRL's padded micro-batch: rows x (prompt + completion).
    A group that does not fit is split, and each part contains the prompt. A micro-batch has at least one completion.
    """
    work = _micro_batch(shape, settings, run)
    tiled = settings["gradient_checkpointing"] and zero_stage < 3
    return work._replace(tiles=tiles(shape, settings, work.tokens)) if tiled else work


def _micro_batch(shape: Shape, settings: Settings, run: Run) -> Work:
    t = settings["max_completion_length"]
    if settings["max_seq_length_train"]:
        t = max(1, min(t, settings["max_seq_length_train"] - run.prompt))
    if not packs(shape, settings):
        return Work(run.rows, run.rows, run.prompt, t, packed=False)
    budget = settings["max_tokens_per_micro_batch"] or run.rows * (run.prompt + t)
    group = settings["num_generations"]
    rows, last = fill(budget, run.prompt, t, group, run.rows * run.steps)
    return Work(-(-(rows + bool(last)) // group), rows, run.prompt, t, packed=True, last=last)

"""The batch of a run, and its largest micro-batch. Pure.

Does not count bytes: memory.py does.
"""

from typing import Any, NamedTuple

from grpo_math.planner.model import Shape
from grpo_math.planner.settings import Settings
from grpo_math.trainer.arrange import fill

ROOM = 64  # tokens that decoding.py's cache has room for beyond those it holds
TILE, MOST_TILES = 1024, 4  # of trainer/tiled_mlp.py, which imports torch


class Run(NamedTuple):
    """What memory needs to know of a run besides its settings: the GPUs of the policy and the batch."""

    processes: int
    rows: int  # per_device_train_batch_size, solved
    steps: int  # micro-batches of an optimizer step
    rollout: int  # completions generated at a time, by all processes
    prompt: int
    gpu_bytes: int
    generation: str  # transformers, colocate or server


class Work(NamedTuple):
    """The largest micro-batch: ``prompts`` of ``prompt`` tokens, ``rows`` completions of ``completion`` tokens, and one
    more of ``last`` tokens that fills it."""

    prompts: int
    rows: int
    prompt: int
    completion: int
    packed: bool
    last: int = 0
    tiles: int = 1  # of tokens, in which an MLP is computed

    @property
    def tokens(self) -> int:
        """Packed: (prompt - 1) once a prompt, and every completion token. Otherwise every row has both."""
        if self.packed:
            return self.prompts * (self.prompt - 1) + self.scored
        return self.rows * (self.prompt + self.completion)

    @property
    def scored(self) -> int:
        return self.rows * self.completion + self.last

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The packed row: of each prompt its tokens without the last, and its completions' lengths."""
        lengths = [*[self.completion] * self.rows, *[self.last] * bool(self.last)]
        group = -(-len(lengths) // self.prompts)
        cut = [lengths[start : start + group] for start in range(0, len(lengths), group)]
        return [{"prompt": self.prompt - 1, "lengths": own} for own in cut]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """What a measurement multiplies: 1, tokens, gathered keys.

        >>> Work(1, 2, 3, 4, packed=True).sizes  # 2 + 4 + 4 tokens
        (1, 10, 14)
        """
        prompts, rows = self.prompts * (self.prompt - 1), self.rows + bool(self.last)
        return 1, self.tokens, prompts + rows * (self.prompt - 1) + self.scored


def packs(shape: Shape, settings: Settings) -> bool:
    """Whether the trainer packs: not if eager attention is asked for."""
    return bool(settings["pack_updates"]) and settings["attn_implementation"] != "eager" and shape.packs


def tiles(shape: Shape, settings: Settings, tokens: int) -> int:
    """In how many tiles of tokens trainer/tiled_mlp.py computes an MLP."""
    whole = settings["use_dora"] or settings["load_in_8bit"] or not shape.tiled
    return 1 if whole else max(1, min(MOST_TILES, tokens // TILE))


def work_of(shape: Shape, settings: Settings, run: Run, zero_stage: int = 0) -> Work:
    """The largest micro-batch that trainer/trainer.py can make: completions of full length, filled to the token budget.

    The budget is ``update_token_budget``, or what TRL's padded micro-batch has: rows x (prompt + completion). A group
    that does not fit is cut, each part with its prompt; at least one completion is in a micro-batch.
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
    budget = settings["update_token_budget"] or run.rows * (run.prompt + t)
    group = settings["num_generations"]
    rows, last = fill(budget, run.prompt, t, group, run.rows * run.steps)
    return Work(-(-(rows + bool(last)) // group), rows, run.prompt, t, packed=True, last=last)

"""The tools of an evaluation: the functions, their settings in the results, and completions of several turns.

The loop is the same as in training (`generation/turns.py`), with any backend.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from typing import Any

from grpo_math.errors import UserError
from grpo_math.generation.chat import Tool
from grpo_math.generation.completion import Completion
from grpo_math.generation.completions import Generate, batch_seed
from grpo_math.generation.turns import UNLIMITED, Conversation, Limits, run_tool_loop
from grpo_math.rewards.inputs import completion_text
from grpo_math.tools import read_limits, read_tools, tool_limits


@dataclass(frozen=True)
class Toolbox:
    """Functions, and the maximum rounds of calls. The results contain ``settings``."""

    functions: Sequence[Tool]
    rounds: int | None
    settings: dict[str, Any] = field(default_factory=dict)

    def conversation(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> Conversation:
        return Conversation(tokenizer, self.functions, self.rounds, template_kwargs)


def toolbox(names: Sequence[str], python: Mapping[str, Any] | None = None, rounds: int | None = None) -> Toolbox | None:
    """Return the tools of a recipe's ``tools``, ``python`` and ``max_tool_calling_iterations``; None without any.

    >>> toolbox(["python"], rounds=2).settings["max_tool_calling_iterations"], toolbox([])
    (2, None)
    """
    if not names:
        return None
    return _toolbox(read_tools(names, read_limits(python or {})), rounds)


def trainer_toolbox(trainer: Any) -> Toolbox | None:
    """Return a trainer's tools; None without any."""
    tools = getattr(getattr(trainer, "grpo_math", None), "tools", None)
    if tools is None:
        for name, attribute in (("environment_factory", "environment_factories"), ("rollout_func", "rollout_func")):
            if getattr(trainer, attribute, None):
                ways = "call trainer.evaluate(data), which is TRL's loop, or evaluate the saved model"
                raise UserError(f"{name}: an evaluation would not ask as training does: {ways}")
        return None
    return _toolbox(tools.conversation.tools, tools.conversation.max_rounds)


def _toolbox(functions: Sequence[Tool], rounds: int | None) -> Toolbox:
    settings: dict[str, Any] = {"names": [tool.__name__ for tool in functions], "max_tool_calling_iterations": rounds}
    for limits in filter(None, map(tool_limits, functions)):
        settings["python"] = asdict(limits)
    return Toolbox(functions, rounds, settings)


def conversing(generate: Generate, conversation: Conversation, longest: int, context: int | None) -> Generate:
    """Return a function that generates completions of several turns, at most ``longest`` tokens with tool results."""

    def conversed(prompts: list[list[int]], seed: int) -> list[Completion]:
        # The first turn has the seed of the batch. A later turn with this seed would draw the same random numbers.
        turn, turns = count(1), zip(generate(prompts, seed), prompts, strict=True)
        first = [replace(one, messages=[conversation.message(one.tokens, prompt)]) for one, prompt in turns]
        rows = run_tool_loop(
            conversation,
            prompts,
            first,
            [{tool.__name__: tool for tool in conversation.tools}] * len(first),
            lambda turn_prompts, _: generate(turn_prompts, batch_seed(seed, next(turn))),
            Limits(longest, context or UNLIMITED, conversation.max_rounds),
        )
        return [replace(row, text=completion_text(list(row.messages))) for row in rows]

    return conversed

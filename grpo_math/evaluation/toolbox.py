"""The tools of an evaluation: what may be called, what the results say of it, and turns in place of one completion.

The loop is that of training (`generation/turns.py`), with whatever backend generates a turn.

Does not confine a call: tools/ does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from typing import Any

from grpo_math.generation.chat import Tool
from grpo_math.generation.completion import Completion
from grpo_math.generation.completions import Generate, batch_seed
from grpo_math.generation.turns import UNLIMITED, Limits, Talk, play, tools_of
from grpo_math.rewards.columns import text_of
from grpo_math.tools import PythonLimits, environment, limits_of, read_limits, read_tools


@dataclass(frozen=True)
class Toolbox:
    """Functions, or what makes an environment, and the most rounds of calls; ``stated``: what the results say."""

    own: Sequence[Tool]
    session: Callable[[], Any] | None
    rounds: int | None
    stated: dict[str, Any] = field(default_factory=dict)
    limits: PythonLimits | None = None  # of the Python tool

    def talk(self, tokenizer: Any) -> Talk:
        return Talk(tokenizer, self.own, self.session, self.rounds)


def toolbox(names: Sequence[str], python: Mapping[str, Any] | None = None, rounds: int | None = None) -> Toolbox | None:
    """The tools of a recipe's ``tools``, ``python`` and ``max_tool_calling_iterations``; None without any.

    >>> toolbox(["python"], rounds=2).stated["max_tool_calling_iterations"], toolbox([])
    (2, None)
    """
    if not names:
        return None
    own = read_limits(python or {})
    return _toolbox(read_tools(names, own), environment(names, own), rounds)


def toolbox_of(trainer: Any) -> Toolbox | None:
    """Those that a trainer trains with."""
    turns = getattr(trainer, "turns", None)
    if turns is None:
        return None
    talk = turns.talk
    return _toolbox(talk.own, talk.session, None if talk.most == UNLIMITED else talk.most)


def _toolbox(own: Sequence[Tool], session: Callable[[], Any] | None, rounds: int | None) -> Toolbox:
    tools = tools_of(own, session() if session else None)
    stated: dict[str, Any] = {"names": [tool.__name__ for tool in tools], "max_tool_calling_iterations": rounds}
    limits = next(filter(None, map(limits_of, tools)), None)
    if limits:
        stated["python"] = asdict(limits)
    return Toolbox(own, session, rounds, stated, limits)


def conversing(generate: Generate, talk: Talk, longest: int, context: int | None) -> Generate:
    """Completions of several turns, of at most ``longest`` tokens with the results of their calls."""

    def conversed(prompts: list[list[int]], seed: int) -> list[Completion]:
        turn, turns = count(1), zip(generate(prompts, seed), prompts, strict=True)
        first = [replace(one, messages=[talk.message(one.tokens, prompt)]) for one, prompt in turns]
        rows = play(
            talk,
            prompts,
            first,
            [talk.functions() for _ in first],
            lambda asked, _: generate(asked, batch_seed(seed, next(turn))),
            Limits(longest, context or UNLIMITED, talk.most),
        )
        return [replace(row, text=text_of(list(row.messages))) for row in rows]

    return conversed

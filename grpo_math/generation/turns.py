"""A conversation with tools: the model's turn, the calls in it, their results, its next turn, and so on.

`play` is the loop of training and of evaluation alike. It does what TRL's does, row for row and token for token, and
besides holds on several ranks: each rank has as many turns as the rank that has most, since what generates may wait for
all of them. A call that raises is answered with the error. What it adds to TRL is the count of each completion.

Does not generate (the caller's ``generate`` does) and does not confine a call: the tool does.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_math.errors import UserError
from grpo_math.generation.chat import Message, Tool, prepare
from grpo_math.generation.completion import Completion

UNLIMITED = 2**31
AT_ONCE = 64  # rows whose calls are under way; how many programs run at once is the tool's to say


class Talk:
    """A tokenizer, and what may be called: prompts and results as token ids, and a turn as a message.

    ``session`` makes an environment of TRL's kind, whose methods are then what may be called, a new one a completion.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Tool] = (),
        session: Callable[[], Any] | None = None,
        most: int | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.own, self.session = tokenizer, list(tools), session
        self.tools = tools_of(self.own, session() if session else None)
        self.most = UNLIMITED if most is None else most
        self.chat_template = prepare(tokenizer, self.tools)
        self.template_kwargs = dict(template_kwargs or {})

    def functions(self) -> dict[str, Tool]:
        """By name, for one completion: in a session of its own, where there are sessions."""
        session = self.session() if self.session else None
        if session is not None:
            session.reset()
        return {tool.__name__: tool for tool in tools_of(self.own, session)}

    def prompt(self, messages: list[Message]) -> list[int]:
        """The token ids of a conversation that the model goes on with."""
        return self._rendered(messages, tools=self.tools, add_generation_prompt=True)

    def message(self, ids: list[int], prompt: list[int]) -> Message:
        """What the model said after ``prompt``; its calls as ``tool_calls``."""
        from trl.chat_template_utils import parse_response

        return parse_response(self.tokenizer, ids, prefix=prompt, tools=self.tools) if ids else {}

    def calls(self, prompt: list[int], ids: list[int]) -> bool:
        """Whether the model called something after ``prompt``."""
        return bool(self.message(ids, prompt).get("tool_calls"))

    def results(self, messages: list[Message]) -> list[int]:
        """The token ids that follow the end of a turn: what its calls gave, and the opening of the next one."""
        call = {"type": "function", "function": {"name": messages[0]["name"], "arguments": {}}}
        asked: list[Message] = [
            {"role": "user", "content": "dummy"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        messages = [{**message, "content": self._inert(message["content"])} for message in messages]
        before, eos = self._rendered(asked), self.tokenizer.eos_token_id
        if eos in before:  # some templates write a line break after it
            before = before[: len(before) - before[::-1].index(eos)]
        whole = self._rendered(asked + messages, add_generation_prompt=True)
        if whole[: len(before)] != before:
            raise UserError("the chat template renders a turn anew once a result follows: use another model's")
        return whole[len(before) :]

    def _inert(self, text: str) -> str:
        """What a tool gave, without the tokens that would end its turn and open another: broken after a character."""
        for token in map(str.strip, self.tokenizer.added_tokens_encoder):
            if len(token) > 1 and token in text:
                text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def _rendered(self, messages: list[Message], **settings: Any) -> list[int]:
        given = {"tokenize": True, "return_dict": False, "chat_template": self.chat_template, **self.template_kwargs}
        return list(self.tokenizer.apply_chat_template(messages, **given, **settings))


def tools_of(own: Sequence[Tool], environment: Any = None) -> list[Any]:
    """What may be called: functions, and the methods of an environment where there is one."""
    return [*own, *(methods_of(environment) if environment is not None else ())]


def methods_of(environment: Any) -> list[Tool]:
    """What may be called of an environment, as TRL finds it: each public method but ``reset`` and ``get_reward``."""
    found = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    names = [name for name, _ in found if name not in ("reset", "get_reward") and not name.startswith("_")]
    return [getattr(environment, name) for name in names]


# Prompts, and how many rows the rank with most of them has -> a turn for each of these prompts, or more turns.
Generate = Callable[[list[list[int]], int], list[Completion]]


@dataclass(frozen=True)
class Limits:
    """Tokens of a completion with its results, of all with the prompt, and rounds of calls.

    ``widest`` says how many rows are open on the rank with most of them, for how many are here.
    """

    completion: int
    context: int = UNLIMITED
    rounds: int = UNLIMITED
    widest: Callable[[int], int] = field(default=lambda open_: open_)


def play(
    talk: Talk,
    prompts: Sequence[list[int]],
    first: Sequence[Completion],
    functions: Sequence[Mapping[str, Tool]],
    generate: Generate,
    limits: Limits,
) -> list[Completion]:
    """Continue completions until they call no tool. ``first`` are the first turns after ``prompts``, with messages.

    ``functions``: by name, for each row. A result that would make a completion longer than ``limits`` is left out, and
    the completion ends with the call.
    """
    rows = [replace(row, mask=[1] * len(row.tokens)) for row in first]
    calling, rounds = [i for i, row in enumerate(rows) if calls_of(row)], 0
    while rounds < limits.rounds:
        continued: dict[int, Completion] = {}
        for i, results in zip(calling, _results(rows, functions, calling), strict=True):
            statuses = [result.get("status") for result in results]
            rows[i] = replace(
                rows[i],
                calls=rows[i].calls + len(results),
                failures=rows[i].failures + len(results) - statuses.count(None),
                timeouts=rows[i].timeouts + statuses.count("timeout"),
            )
            ids = talk.results(results)
            row = _longer(rows[i], Completion(ids, [0.0] * len(ids)), 0, results)
            if len(row.tokens) <= limits.completion and len(prompts[i]) + len(row.tokens) < limits.context:
                continued[i] = row
        # Ranks generate together: a rank without open rows takes part as long as any rank has some.
        widest = limits.widest(len(continued))
        if not widest:
            break
        turns = generate([prompts[i] + row.tokens for i, row in continued.items()], widest)
        for turn, (i, row) in zip(turns, continued.items(), strict=False):
            room = limits.completion - len(row.tokens)
            message = talk.message(turn.tokens[:room], prompts[i] + row.tokens)
            shorter = replace(turn, tokens=turn.tokens[:room], logps=turn.logps and turn.logps[:room])
            rows[i] = _longer(row, shorter, 1, [message] if message else [])
            rows[i] = replace(rows[i], truncated=turn.truncated or len(turn.tokens) > room)
        calling, rounds = [i for i in continued if calls_of(rows[i])], rounds + 1
    return rows


def calls_of(row: Completion) -> list[Message]:
    """Return the calls of the last turn. If the turn is the last message, they have no results yet."""
    return row.messages[-1].get("tool_calls") or [] if row.messages else []


def _longer(row: Completion, more: Completion, written: int, messages: Sequence[Message]) -> Completion:
    """Append tokens and messages: a turn of the model (``written`` 1), or the results of its calls (0)."""
    return replace(
        row,
        tokens=row.tokens + more.tokens,
        logps=None if row.logps is None or more.logps is None else row.logps + more.logps,
        mask=[*row.mask, *[written] * len(more.tokens)],
        messages=[*row.messages, *messages],
    )


def _results(
    rows: Sequence[Completion], functions: Sequence[Mapping[str, Tool]], calling: Sequence[int]
) -> list[list[Message]]:
    """Make the calls of these rows' last turns, and return the messages with their results.

    Calls of the Python tool alone run side by side. The user's own functions are called by one thread.
    """

    def of_row(i: int) -> list[Message]:
        return [_called(call, functions[i]) for call in calls_of(rows[i])]

    if all(tool.__module__.startswith("grpo_math.tools") for i in calling for tool in functions[i].values()):
        with ThreadPoolExecutor(AT_ONCE) as threads:
            return list(threads.map(of_row, calling))
    return [of_row(i) for i in calling]


def _called(call: Message, functions: Mapping[str, Tool]) -> Message:
    """Make a call. The message has a ``status`` if the call failed: failed, or timeout."""
    name, status = call.get("name", "unknown"), "done"
    try:
        if call["type"] != "function":
            raise ValueError(f"Unsupported tool call type: {call['type']}")
        name = call["function"]["name"]
        if name not in functions:
            raise ValueError(f"Tool {name} not found.")
        result = functions[name](**call["function"]["arguments"])
        if inspect.isawaitable(result):
            result = asyncio.run(_of(result))
        status = getattr(result, "status", status)  # of the Python tool, which does not raise
    except UserError:
        raise  # the machine's fault, and no answer for a model
    except Exception as error:
        status = "timeout" if isinstance(error, TimeoutError) else "failed"
        result = {"error": str(error)}
    message = {"role": "tool", "name": name, "content": str(result)}
    return message if status == "done" else {**message, "status": status}


async def _of(result: Any) -> Any:
    return await result

"""Run a conversation with tools: the model's turn, its calls, their results, the next turn, and so on.

`run_tool_loop` serves training and evaluation. It gives the same rows and tokens as TRL's loop. It also works on
several ranks: each rank has as many turns as the rank with the most, because generation may wait for all ranks. If a
call raises, the error is its result. In addition to TRL's loop, calls are counted for each completion.

The caller's ``generate`` generates. A tool sandboxes its calls.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_math.errors import UserError
from grpo_math.generation.chat import Message, Tool, prepare
from grpo_math.generation.completion import Completion
from grpo_math.grading.workers import default_size
from grpo_math.system.user_functions import start

UNLIMITED = 2**31


class Conversation:
    """A tokenizer and tools. Converts prompts and results to token ids, and a turn to a message."""

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Tool] = (),
        max_rounds: int | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.tools: list[Any] = list(tools)
        self.max_rounds = max_rounds
        self.chat_template = prepare(tokenizer, self.tools)
        self.template_kwargs = dict(template_kwargs or {})

    def prompt(self, messages: list[Message]) -> list[int]:
        """Return the token ids of a conversation that the model is to continue."""
        return self._rendered(messages, tools=self.tools, add_generation_prompt=True)

    def message(self, ids: list[int], prompt: list[int]) -> Message:
        """Return the model's turn after ``prompt`` as a message, with its calls as ``tool_calls``."""
        from trl.chat_template_utils import parse_response

        return parse_response(self.tokenizer, ids, prefix=prompt, tools=self.tools) if ids else {}

    def results(self, messages: list[Message]) -> list[int]:
        """Return the token ids after the end of a turn: the results of its calls, and the opening of the next turn."""
        # As in TRL: a dummy conversation replaces the real one, because rendering the model's turn again could give
        # other tokens than it sampled. The name is real: some templates begin a result with the name of its call.
        call = {"type": "function", "function": {"name": messages[0]["name"], "arguments": {}}}
        dummy: list[Message] = [
            {"role": "user", "content": "dummy"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        messages = [{**message, "content": self._inert(message["content"])} for message in messages]
        before, eos = self._rendered(dummy), self.tokenizer.eos_token_id
        # Some templates write a line break after EOS, which the model has not sampled.
        if eos in before:
            before = before[: len(before) - before[::-1].index(eos)]
        with_results = self._rendered(dummy + messages, add_generation_prompt=True)
        if with_results[: len(before)] != before:
            raise UserError("the chat template renders a turn differently once a result follows: use another model's")
        return with_results[len(before) :]

    def _inert(self, text: str) -> str:
        """Split special tokens in a tool's result, because they would end the turn and open another."""
        for token in map(str.strip, self.tokenizer.added_tokens_encoder):
            # A token of one character cannot be split.
            if len(token) > 1 and token in text:
                text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def _rendered(self, messages: list[Message], **settings: Any) -> list[int]:
        options = {"tokenize": True, "return_dict": False, "chat_template": self.chat_template, **self.template_kwargs}
        return list(self.tokenizer.apply_chat_template(messages, **options, **settings))


# Prompts, and the number of rows of the rank with the most -> a turn for each of these prompts, or more turns.
Generate = Callable[[list[list[int]], int], list[Completion]]


@dataclass(frozen=True)
class Limits:
    """The limits of a conversation.

    ``completion``: tokens of a completion, results included. ``context``: the same with the prompt. ``rounds``: rounds
    of calls (None: no limit). ``widest`` takes the number of open rows on this rank, and returns the largest number of
    any rank.
    """

    completion: int
    context: int = UNLIMITED
    rounds: int | None = None
    widest: Callable[[int], int] = field(default=lambda open_: open_)


def run_tool_loop(
    conversation: Conversation,
    prompts: Sequence[list[int]],
    first: Sequence[Completion],
    functions: Sequence[Mapping[str, Tool]],
    generate: Generate,
    limits: Limits,
) -> list[Completion]:
    """Continue completions until they do not call a tool. ``first``: the first turns after ``prompts``, with messages.

    ``functions``: by name, for each row. A result that would make a completion longer than ``limits`` is left out, and
    the completion ends with the call.
    """
    rows = [replace(row, mask=[1] * len(row.tokens)) for row in first]
    calling = [i for i, row in enumerate(rows) if last_calls(row)]
    for _ in range(UNLIMITED if limits.rounds is None else limits.rounds):
        continued: dict[int, Completion] = {}
        for i, results in zip(calling, _results(rows, functions, calling), strict=True):
            statuses = [result.get("status") for result in results]
            rows[i] = replace(
                rows[i],
                calls=rows[i].calls + len(results),
                failures=rows[i].failures + len(results) - statuses.count(None),
                timeouts=rows[i].timeouts + statuses.count("timeout"),
            )
            ids = conversation.results(results)
            row = _longer(rows[i], Completion(ids, [0.0] * len(ids)), 0, results)
            # As in TRL: vLLM and transformers raise an error for an input that is longer than the context.
            if len(row.tokens) <= limits.completion and len(prompts[i]) + len(row.tokens) < limits.context:
                continued[i] = row

        # Ranks generate together: a rank without open rows takes part as long as any rank has some.
        widest = limits.widest(len(continued))
        if not widest:
            break

        turns = generate([prompts[i] + row.tokens for i, row in continued.items()], widest)
        # More turns than rows: the prompts that were added for ``widest`` come last, and their turns are dropped.
        for turn, (i, row) in zip(turns, continued.items(), strict=False):
            room = limits.completion - len(row.tokens)
            message = conversation.message(turn.tokens[:room], prompts[i] + row.tokens)
            shorter = replace(
                turn,
                tokens=turn.tokens[:room],
                logps=turn.logps and turn.logps[:room],
                truncated=turn.truncated or len(turn.tokens) > room,
            )
            rows[i] = _longer(row, shorter, 1, [message] if message else [])
        calling = [i for i in continued if last_calls(rows[i])]
    return rows


def last_calls(row: Completion) -> list[Message]:
    """Return the calls of the last turn. If the turn is the last message, they have no results yet."""
    return row.messages[-1].get("tool_calls") or [] if row.messages else []


def _longer(row: Completion, more: Completion, written: int, messages: Sequence[Message]) -> Completion:
    """Append tokens and messages: a turn of the model (``written`` 1), or the results of its calls (0)."""
    return replace(
        row,
        tokens=row.tokens + more.tokens,
        logps=None if row.logps is None or more.logps is None else row.logps + more.logps,
        mask=[*row.mask, *[written] * len(more.tokens)],
        truncated=more.truncated,
        messages=[*row.messages, *messages],
    )


def _results(
    rows: Sequence[Completion], functions: Sequence[Mapping[str, Tool]], calling: Sequence[int]
) -> list[list[Message]]:
    """Make the calls of these rows' last turns, and return the messages with their results.

    Calls run in parallel, one per core, if the Python tool is the only tool. More would exceed their time limits only
    because they wait for each other. User functions are called by one thread.
    """

    def call_results(i: int) -> list[Message]:
        # The async calls of a turn run at the same time.
        started = [_start(call, functions[i]) for call in last_calls(rows[i])]
        return [_result(name, future) for name, future in started]

    if all(tool.__module__.startswith("grpo_math.tools") for i in calling for tool in functions[i].values()):
        with ThreadPoolExecutor(default_size()) as threads:
            return list(threads.map(call_results, calling))
    return [call_results(i) for i in calling]


def _start(call: Message, functions: Mapping[str, Tool]) -> tuple[str, Future[Any]]:
    """Make a call, and return the tool's name and its result. An async tool may still be running."""
    name, result = "unknown", Future[Any]()
    try:
        name = call["function"]["name"]
        if name not in functions:
            raise ValueError(f"Tool {name} not found.")
        value = functions[name](**call["function"]["arguments"])
        if inspect.iscoroutine(value):
            return name, start(value)
        result.set_result(value)
    except (Exception, SystemExit) as error:
        result.set_exception(error)
    return name, result


def _result(name: str, future: Future[Any]) -> Message:
    """Return the message with the result of a call. It has a ``status`` if the call failed: failed, or timeout."""
    status = "done"
    try:
        result = future.result()
        # The Python tool does not raise, and its answer has a status.
        status = getattr(result, "status", status)
    except UserError:
        raise  # caused by the machine, so not a result for the model
    except (Exception, SystemExit) as error:
        status = "timeout" if isinstance(error, TimeoutError) else "failed"
        result = {"error": str(error)}
    content = str(result).encode("utf-8", "replace").decode()  # without halves of characters
    message = {"role": "tool", "name": name, "content": content}
    return message if status == "done" else {**message, "status": status}

"""What a completion's calls are worth: the reward `tool_use`, and which results the model had said itself.

A call has effect where its result gives the answer and the model had not said the answer by then, in its code or beside
it. The rule and the search that holds it are in docs/tools.md.

Does not run a call, and does not grade.
"""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.grading.equal.compare import value
from grpo_math.rewards.columns import Completion, Reward, grades_of
from grpo_math.rewards.rules import is_right

# Python reads no integer of more than 4,300 digits.
NUMBER = re.compile(r"(?<![\w.])\d{1,1000}(?:\.\d{1,1000})?(?:[eE][+-]?\d{1,3})?(?!\w|\.\d)")
Message = Mapping[str, Any]


def results_of(completion: Completion) -> list[tuple[str, Message]]:
    """Of each call: what the model had written by then, its code with it, and the message with its result.

    >>> code = {"function": {"name": "python", "arguments": {"code": "print(3 + 4)"}}}
    >>> calls = {"role": "assistant", "content": "Let me see.", "tool_calls": [code]}
    >>> results_of([calls, {"role": "tool", "content": "7"}, {"role": "assistant", "content": "#### 7"}])
    [('Let me see.\\nprint(3 + 4)', {'role': 'tool', 'content': '7'})]
    """
    said: list[str] = []
    found: list[tuple[str, Message]] = []
    for message in completion if not isinstance(completion, str) else ():
        content = str(message.get("content") or "")
        if message.get("role") == "tool":
            found.append(("\n".join(said), message))
            continue
        said += [content, *(_code(call) for call in message.get("tool_calls") or ())]
        said = [text for text in said if text]
    return found


def _code(call: Message) -> str:
    arguments = (call.get("function") or {}).get("arguments") or {}
    return "\n".join(str(value) for value in arguments.values()) if isinstance(arguments, Mapping) else str(arguments)


def echoed(completion: Completion) -> list[bool]:
    """Of each result, whether the model had written it already: ``print(391)``, or the answer and then the call.

    >>> call = {"function": {"name": "python", "arguments": {"code": "print(391)"}}}
    >>> echoed([{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "391"}])
    [True]
    """
    results = [(said, str(message["content"]).strip()) for said, message in results_of(completion)]
    return [bool(result) and _says(said, result) for said, result in results]


def _says(said: str, result: str) -> bool:
    """Whether a text holds a result: a number whatever its sign and its separators, anything else word for word."""
    number = value(result)
    if number is None:
        return result in said
    written = {*NUMBER.findall(said), *NUMBER.findall(re.sub("[,_]", "", said))}
    return any(Fraction(found) == abs(number) for found in written)


def make_tool_use(effect: float = 1.0, failed: float = 0.0) -> Reward:
    """``effect`` for a right answer that a call has given, less ``failed`` for each that failed.

    A call has given the answer where the last line of its result is the answer, and the model had not written it by
    then. So a completion earns nothing by a call that prints what it knows, by one whose result it does not use, by a
    second one, or by any call before a wrong answer.
    """
    if effect < 0 or failed < 0:
        raise ConfigError("effect" if effect < 0 else "failed", min(effect, failed), "is negative", "give 0 or more")

    def tool_use(prompts: Sequence[Any], completions: Sequence[Completion], **columns: Any) -> list[float | None]:
        rewards: list[float | None] = []
        for grade, completion in zip(grades_of("tool_use", completions, columns), completions, strict=True):
            right, results = is_right(grade), results_of(completion)
            lost = failed * sum("status" in message for _, message in results)
            gave = right and any(_gives(message, said, (grade.answer or "").strip()) for said, message in results)
            rewards.append(None if right is None else effect * bool(gave) - lost)
        return rewards

    return tool_use


def _gives(result: Message, said: str, answer: str) -> bool:
    lines = str(result["content"]).strip().splitlines()
    if not lines or not answer or "status" in result:
        return False
    last, wanted = lines[-1].strip(), value(answer)
    same = last == answer if wanted is None else value(last) == wanted
    return same and not _says(said, answer)

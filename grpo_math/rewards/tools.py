"""The reward `tool_use`, and the search for tool results that the model had written before the call.

A call has an effect if its result is the answer and the model had not written the answer before the result, in its code
or next to it. docs/operations.md explains the rule and how it is checked.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from grpo_math.grading.equal.compare import value
from grpo_math.rewards.inputs import Completion, Completions, Prompts, Rewards, completion_grades, is_right

# Python reads no integer of more than 4,300 digits.
NUMBER = re.compile(r"(?<![\w.])\d{1,1000}(?:\.\d{1,1000})?(?:[eE][+-]?\d{1,3})?(?!\w|\.\d)")
Message = Mapping[str, Any]


def tool_results(completion: Completion) -> list[tuple[str, Message]]:
    """Return, for each call, the text and code that the model had written by then, and the message with the result.

    >>> code = {"function": {"name": "python", "arguments": {"code": "print(3 + 4)"}}}
    >>> calls = {"role": "assistant", "content": "Let me see.", "tool_calls": [code]}
    >>> tool_results([calls, {"role": "tool", "content": "7"}, {"role": "assistant", "content": "#### 7"}])
    [('Let me see.\\nprint(3 + 4)', {'role': 'tool', 'content': '7'})]
    """
    written: list[str] = []
    results: list[tuple[str, Message]] = []
    for message in completion if not isinstance(completion, str) else ():
        content = str(message.get("content") or "")
        if message.get("role") == "tool":
            results.append(("\n".join(written), message))
            continue
        written += filter(None, [content, *map(_code, message.get("tool_calls") or ())])
    return results


def _code(call: Message) -> str:
    arguments = (call.get("function") or {}).get("arguments") or {}
    return "\n".join(str(value) for value in arguments.values()) if isinstance(arguments, Mapping) else str(arguments)


def echoed(completion: Completion) -> list[bool]:
    """Return, for each result, True if the model had written it already, as in ``print(391)``.

    >>> call = {"function": {"name": "python", "arguments": {"code": "print(391)"}}}
    >>> echoed([{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "391"}])
    [True]
    """
    results = [(written, str(message["content"]).strip()) for written, message in tool_results(completion)]
    return [bool(result) and _contains(written, result) for written, result in results]


def _contains(text: str, result: str) -> bool:
    """Return True if a text contains a result: a number with any sign and separators, or else the exact text."""
    number = value(result)
    if number is None:
        return result in text
    # With and without separators: ``1,234`` may be one number, or two in a list.
    literals = {*NUMBER.findall(text), *NUMBER.findall(re.sub("[,_]", "", text))}
    return any(Fraction(literal) == abs(number) for literal in literals)


def tool_use(prompts: Prompts, completions: Completions, **columns: Any) -> Rewards:
    """Return 1 for a right answer that a call produced, else 0.

    A call produced the answer if the last line of its result is the answer and the model had not written the answer
    before. So a call earns nothing if it prints a known answer, if its result is not used, if it is a second call, or
    if the answer is wrong.
    """
    rewards: Rewards = []
    for grade, completion in zip(completion_grades("tool_use", completions, columns), completions, strict=True):
        right, answer = is_right(grade), (grade.answer or "").strip()
        gave = right and any(_gives(message, written, answer) for written, message in tool_results(completion))
        rewards.append(None if right is None else float(bool(gave)))
    return rewards


def _gives(result: Message, written: str, answer: str) -> bool:
    lines = str(result["content"]).strip().splitlines()
    if not lines or not answer or "status" in result:
        return False
    last, expected = lines[-1].strip(), value(answer)
    same = last == answer if expected is None else value(last) == expected
    return same and not _contains(written, answer)

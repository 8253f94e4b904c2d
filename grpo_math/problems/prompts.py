r"""A problem -> the prompt that the model sees, which asks for the answer in a format.

Each template is one function: the text of a problem -> a text, or a list of chat messages, that TRL can tokenize.
Its name is also the name of the answer format, and grading/formats.py holds what that format looks like.

>>> r1_zero("What is 3 + 4?")[-20:]
'?\nAssistant: <think>'
>>> gsm8k("What is 3 + 4?")[-1]
{'role': 'user', 'content': 'What is 3 + 4?'}

Does not tokenize, and does not apply a chat template: TRL does both.
"""

from collections.abc import Callable, Collection
from typing import Any

from grpo_math.errors import ConfigError, one_of

Prompt = str | list[dict[str, Any]]


def gsm8k(problem: str) -> Prompt:
    """A chat with one worked example whose last line is ``#### N`` (the format of GSM8K's own solutions)."""
    return _chat("Work it out, then give the number after ####.", problem, "3 + 4 = 7\n#### 7")


def direct(problem: str) -> Prompt:
    """A chat whose worked example is the line ``#### N`` alone, so that completions are short."""
    return _chat("Give the number after ####.", problem, "#### 7")


def boxed(problem: str) -> Prompt:
    r"""A chat that asks for the final answer in ``\boxed{}``, the form of MATH's solutions."""
    return _chat(r"Please reason step by step, and put your final answer within \boxed{}.", problem)


def r1_zero(problem: str) -> Prompt:
    """Plain text for a base model, after DeepSeek-R1-Zero (arXiv 2501.12948, table 1): think, then answer, in tags."""
    return (
        "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The "
        "Assistant first thinks about the reasoning process in the mind and then provides the User with the answer. "
        "The reasoning process is enclosed within <think> </think> and answer is enclosed within <answer> </answer> "
        "tags, respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>.\n"
        f"User: {problem}\nAssistant: <think>"
    )


def xml(problem: str) -> Prompt:
    """A chat that asks for a reasoning part and an answer part, each in tags."""
    return _chat("Respond in this form:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>", problem)


def python(problem: str) -> Prompt:
    """A chat whose worked example calls the tool python for 3 + 4, and then gives ``#### N``."""
    call = {"type": "function", "function": {"name": "python", "arguments": {"code": "print(3 + 4)"}}}
    called: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "python", "content": "7"},
    ]
    system, question, answer, asked = _chat(
        "Calculate with Python, then give the number after ####.", problem, "#### 7"
    )
    return [system, question, *called, answer, asked]


def _chat(system: str, problem: str, worked: str | None = None) -> list[dict[str, Any]]:
    """``worked``: the assistant's answer to 3 + 4, as an example before the problem."""
    said = [("system", system)]
    if worked is not None:
        said += [("user", "What is 3 + 4?"), ("assistant", worked)]
    return [{"role": role, "content": content} for role, content in (*said, ("user", problem))]


TEMPLATES: dict[str, Callable[[str], Prompt]] = {
    "gsm8k": gsm8k, "direct": direct, "boxed": boxed, "r1_zero": r1_zero, "xml": xml,
    "python": python,
}  # fmt: skip


def build_prompt(problem: str, template: str) -> Prompt:
    """The prompt of ``problem`` by the template's name; an unknown name is a `ConfigError`."""
    one_of("template", template, tuple(TEMPLATES))
    return TEMPLATES[template](problem)


def refuse_without_call(template: str, tools: Collection[str]) -> None:
    """`ConfigError` for a template and tools that cannot work together.

    >>> refuse_without_call("python", [])
    Traceback (most recent call last):
    ...
    grpo_math.errors.ConfigError: template='python' shows a call of python, which is not among tools: ...
    """
    if template == "python" and "python" not in tools:
        raise ConfigError(
            "template", template, "shows a call of python, which is not among tools", "set tools: [python]"
        )
    if tools and template == "r1_zero":
        raise ConfigError("template", template, "is plain text, in which nothing can be called", "use boxed, or python")

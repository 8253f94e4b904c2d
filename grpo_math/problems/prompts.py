r"""A problem -> the prompt for the model, which asks for the answer in a format.

Each of `TEMPLATES` is a function: problem -> text or chat messages that TRL can tokenize. The function's name in the
table is also the name of the answer format, which grading/formats.py describes. A `Template` is one of these or the
user's prompt, with a system prompt and an answer format.

>>> as_template("r1_zero").prompt("What is 3 + 4?")[-20:]
'?\nAssistant: <think>'
>>> as_template("gsm8k").prompt("What is 3 + 4?")[-1]
{'role': 'user', 'content': 'What is 3 + 4?'}

TRL tokenizes the prompt and applies the chat template.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from grpo_math.errors import ConfigError, require_choice
from grpo_math.grading.formats import FORMATS
from grpo_math.settings.data import AS_IS, PROBLEM
from grpo_math.system.user_functions import is_user_function, load_function

Prompt = str | list[dict[str, Any]]
# A chat template that has been applied: special tokens of a model, or the beginning of its turn.
CHAT_TOKENS = re.compile(
    r"<[|｜][\w▁]{3,40}[|｜]>|</?s>|\[/?INST\]|<(?:start|end)_of_turn>|### ?(?:Instruction|Response):"
    r"|\n(?:Assistant|ASSISTANT):\s*+(?:<think>\s*)?\Z"
)


def _chat(system: str, problem: str, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a system message, an example, and the problem as the user's message."""
    return [{"role": "system", "content": system}, *messages, {"role": "user", "content": problem}]


def _worked(answer: str, *messages: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return an example: the assistant's answer to 3 + 4, after these messages."""
    return {"role": "user", "content": "What is 3 + 4?"}, *messages, {"role": "assistant", "content": answer}


# Functions of the problem, so that rows share no messages: a change to one would change all.
TEMPLATES: dict[str, Callable[[str], Prompt]] = {
    # A worked example whose last line is #### N, the format of GSM8K's own solutions
    "gsm8k": lambda problem: _chat(
        "Work it out, then give the number after ####.", problem, *_worked("3 + 4 = 7\n#### 7")
    ),
    # A worked example with only this line, so that completions are short
    "direct": lambda problem: _chat("Give the number after ####.", problem, *_worked("#### 7")),
    # The form of MATH's solutions
    "boxed": lambda problem: _chat(r"Please reason step by step, and put your final answer within \boxed{}.", problem),
    # Plain text for a base model, after DeepSeek-R1-Zero (arXiv 2501.12948, table 1): think, then answer, in tags
    "r1_zero": lambda problem: (
        "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The "
        "Assistant first thinks about the reasoning process in the mind and then provides the User with the answer. "
        "The reasoning process is enclosed within <think> </think> and answer is enclosed within <answer> </answer> "
        "tags, respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>.\n"
        f"User: {problem}\nAssistant: <think>"
    ),
    # A reasoning or thinking part and an answer part, each in tags
    "xml": lambda problem: _chat(
        "Respond in this form:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>", problem
    ),
    "think": lambda problem: _chat(
        "Think first, then answer, in this form:\n<think>\n...\n</think>\n<answer>\n...\n</answer>", problem
    ),
}


class Template(NamedTuple):
    """A prompt around a problem. ``name`` is one of `TEMPLATES`, `AS_IS`, a text with {problem}, or module:function."""

    name: str
    system: str | None
    answer_format: str

    def __str__(self) -> str:
        return self.name

    def prompt(self, problem: str, row_prompt: Prompt | None = None) -> Prompt:
        """Return the prompt of a problem. ``row_prompt`` is the prompt in the row, if there is one."""
        name = PROBLEM if self.name == AS_IS else self.name
        prompt = row_prompt if row_prompt and self.name == AS_IS else _filled(name, problem)
        if self.system is None:
            return prompt
        if isinstance(prompt, str):
            reason = f"would be ignored: {self.name} makes plain text"
            raise ConfigError("system_prompt", self.system, reason, "leave one of them out")
        system = {"role": "system", "content": self.system}
        return [system, *(message for message in prompt if message["role"] != "system")]


def recipe_template(settings: Mapping[str, Any]) -> Template:
    """Return the template that a recipe or a run's config.yaml states. Raises `ConfigError`.

    >>> recipe_template({"system_prompt": r"Give the answer in \boxed{}."}).prompt("1 + 1?")[1]
    {'role': 'user', 'content': '1 + 1?'}
    """
    system = settings.get("system_prompt")
    name = settings.get("prompt_template") or (PROBLEM if system else "gsm8k")
    return as_template(name, system, settings.get("answer_format"), "prompt_template")


def as_template(
    name: str | Template, system: str | None = None, answer_format: str | None = None, field: str = "template"
) -> Template:
    """Return the template with that name or text. Without ``answer_format``, the prompt's text decides the format.

    >>> as_template("{problem} Give the answer after ####.").answer_format
    'gsm8k'
    """
    if isinstance(name, Template):
        return name
    if PROBLEM not in name and not (is_user_function(name) and len(name.split()) == 1):
        if len(name.split()) > 1:
            raise ConfigError(field, name, f"does not contain {PROBLEM}", f"write {PROBLEM} in the problem's place")
        require_choice(field, name, (*TEMPLATES, AS_IS))
    template = Template(name, system, "")
    # Make a prompt here, before any data is read: a function of the user may fail.
    example = template.prompt("3 + 4?")
    answer_format = answer_format or (name if name in FORMATS else format_shown(example) or "boxed")
    require_choice("answer_format", answer_format, tuple(FORMATS))
    return template._replace(answer_format=answer_format)


def _filled(name: str, problem: str) -> Prompt:
    if name not in TEMPLATES and PROBLEM not in name:
        prompt = load_function("prompt_template", name)(problem)
        if not prompt or not isinstance(prompt, str | list):
            remedy = "return text, or messages with role and content"
            raise ConfigError("prompt_template", name, f"returned a {type(prompt).__name__}", remedy)
        return prompt
    if name in TEMPLATES:
        return TEMPLATES[name](problem)
    return [{"role": "user", "content": name.replace(PROBLEM, problem)}]


def format_shown(prompt: Prompt) -> str | None:
    r"""Return the answer format whose tags the prompt shows; None if it shows none.

    >>> format_shown("Answer after ####. 3 + 4?"), format_shown("3 + 4?"), format_shown("<answer> </answer> <think>")
    ('gsm8k', None, 'r1_zero')
    """
    text = prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)
    # The prompt opens the tag, so the completion does not.
    if text.rstrip().endswith("<think>"):
        return "r1_zero"
    shown = {name: len(form.tags) for name, form in FORMATS.items() if all(tag in text for tag in form.tags)}
    # More tags are more specific.
    return max(shown, key=lambda name: shown[name], default=None)

"""What an answer looks like: the formats that a prompt can ask for, and whether a completion keeps to one.

Does not find the answer in a completion (where.py) nor build prompts (problems/prompts.py).
"""

import re
from dataclasses import dataclass

from grpo_math.errors import one_of


@dataclass(frozen=True)
class AnswerFormat:
    """What a completion must look like. ``marker`` finds answers (group 1); ``strict`` matches a whole completion.

    ``tags`` are the pieces that partial credit counts, in the order in which they must stand; ``example`` is a whole
    completion in the format, with ANSWER where the answer stands.
    """

    name: str
    marker: re.Pattern[str]
    strict: re.Pattern[str]
    tags: tuple[str, ...]
    example: str


def _in_tags(name: str, thought: str) -> AnswerFormat:
    """Return the format of a thought and an answer, each in tags."""
    return AnswerFormat(
        name,
        marker=re.compile(r"<answer>(.*?)</answer>", re.DOTALL),
        strict=re.compile(
            rf"\s*<{thought}>(?:(?!</?{thought}>|</?answer>).)*</{thought}>\s*"
            r"<answer>(?!\s*</answer>)(?:(?!</?answer>).)+</answer>\s*",
            re.DOTALL,
        ),
        tags=(f"<{thought}>", f"</{thought}>", "<answer>", "</answer>"),
        example=f"<{thought}>\nIt follows.\n</{thought}>\n<answer>\nANSWER\n</answer>\n",
    )


# Every `strict` takes exactly one answer, and not an empty one: two are two tries. Every pattern is linear: no nested
# quantifier that could backtrack on a hostile completion. `boxed` only finds where a box opens, since braces nest; the
# extractor walks them.
BOX = r"\\f?box(?:ed)?(?![A-Za-z])"
HASHES = re.compile(r"####[ \t]*([^\n]*)")
FORMATS: dict[str, AnswerFormat] = {
    "gsm8k": AnswerFormat(
        "gsm8k",
        marker=HASHES,
        strict=re.compile(r"[^#]*####[ \t]*[^\s#][^\n#]*(?:\n\s*)?", re.DOTALL),
        tags=("####",),
        example="It follows.\n#### ANSWER",
    ),
    "direct": AnswerFormat(
        "direct",
        marker=HASHES,
        strict=re.compile(r"\s*####[ \t]*[^\s#][^\n#]*(?:\n\s*)?"),
        tags=("####",),
        example="#### ANSWER",
    ),
    "boxed": AnswerFormat(
        "boxed",
        marker=re.compile(r"\\f?boxed[ \t]*(?=\{)"),
        # What was boxed while thinking is no answer. (?=(..))\1 takes what it found and does not try less: Python 3.11
        # before 3.11.5 gets the possessive form wrong.
        strict=re.compile(
            rf"(?=((?:.*</think>)?))\1(?=((?:(?!{BOX}).)*))\2\\f?boxed[ \t]*\{{(?!\s*\}})"
            rf"(?=((?:(?!{BOX}).)*))(?=\3\Z).*\}}.*",
            re.DOTALL,
        ),
        tags=("\\boxed",),
        example=r"It follows: \boxed{ANSWER}.",
    ),
    # The prompt has opened <think> already.
    "r1_zero": AnswerFormat(
        "r1_zero",
        marker=re.compile(r"<answer>(.*?)</answer>", re.DOTALL),
        strict=re.compile(
            r"(?:(?!</?think>|</?answer>).)*</think>\s*<answer>(?!\s*</answer>)(?:(?!</?answer>).)+</answer>\s*",
            re.DOTALL,
        ),
        tags=("</think>", "<answer>", "</answer>"),
        example="It follows. </think> <answer>ANSWER</answer>",
    ),
    "xml": _in_tags("xml", "reasoning"),
    "think": _in_tags("think", "think"),
    # After the results of its calls, and a number: the task itself, "#### 12 * 34", is none.
    "python": AnswerFormat(
        "python",
        marker=HASHES,
        strict=re.compile(r"[^#]*####[ \t]*-?\d[\d,]*(?:\.\d+)?(?:\n\s*)?", re.DOTALL),
        tags=("####",),
        example="#### ANSWER",
    ),
}


def in_format(completion: str, answer_format: str) -> bool:
    r"""Does the whole completion keep to the format, with one answer in it?

    >>> in_format("3 + 4 = 7\\n#### 7", "gsm8k"), in_format("It is 7.", "gsm8k")
    (True, False)
    >>> in_format("#### 7", "direct"), in_format("3 + 4 = 7\\n#### 7", "direct")
    (True, False)
    >>> in_format(r"so \boxed{7}", "boxed"), in_format(r"\boxed{7} or \boxed{8}", "boxed")
    (True, False)
    >>> in_format("easy </think> <answer>7</answer>", "r1_zero"), in_format("<answer>7</answer>", "r1_zero")
    (True, False)
    """
    one_of("answer_format", answer_format, tuple(FORMATS))
    return FORMATS[answer_format].strict.fullmatch(completion) is not None


def made_up(answer: str, answer_format: str) -> str:
    """A completion that keeps to the format and gives ``answer``.

    >>> made_up("7", "gsm8k")
    'It follows.\\n#### 7'
    >>> all(in_format(made_up("7", name), name) for name in FORMATS)
    True
    """
    one_of("answer_format", answer_format, tuple(FORMATS))
    return FORMATS[answer_format].example.replace("ANSWER", answer)

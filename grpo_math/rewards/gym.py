"""The reward `reasoning_gym`: the score of the package reasoning-gym, which accepts each right answer of a problem.

Some generators of the package evaluate an answer as Python. So an answer is scored by a program of the Python tool, in
its sandbox (tools/sandbox.py). An answer that could reach more than numbers gets 0: next to the generator's code it
could change the score.
"""

import builtins
import re
import secrets
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from grpo_math.errors import RewardError
from grpo_math.grading.where import find
from grpo_math.rewards.inputs import Completions, Prompts, Rewards, completion_grades, in_formats, is_right
from grpo_math.tools import PythonLimits, call
from grpo_math.tools.server import PACKAGES

COLUMN = "reasoning_gym"
# The builtin names of Python that an expression of mathematics has.
MATHEMATICAL = {"abs", "max", "min", "pow", "round", "sum", "int", "float", "complex", "divmod", "all", "any"}
BUILTINS = {*dir(builtins)} - MATHEMATICAL
ATTRIBUTE = re.compile(r"\.\s*[^\W\d]|__")
PROGRAM = """
import base64, pickle, reasoning_gym
name, parameters, entry = pickle.loads(base64.b64decode({entry!r}))
print({secret!r}, float(reasoning_gym.create_dataset(name, **parameters).score_answer({answer!r}, entry)))
"""


def reasoning_gym(prompts: Prompts, completions: Completions, **columns: Any) -> Rewards:
    """Return 1 for an answer that the grader finds right, else the score of the problem's generator (0 to 1).

    Needs ``dataset: reasoning_gym:NAME``. An answer that the generator fails on gets 0.
    """
    if columns.get(COLUMN) is None:
        raise RewardError(f"reward function reasoning_gym needs the column {COLUMN}: set dataset: reasoning_gym:NAME")
    rights = map(is_right, completion_grades(COLUMN, completions, columns))
    answers = [find(text, name).text for text, name in in_formats(completions, columns)]
    with ThreadPoolExecutor(8) as threads:
        return list(threads.map(_score, rights, answers, columns[COLUMN]))


def _score(right: float | None, answer: str | None, entry: str) -> float:
    if right == 1.0 or answer is None:
        return right or 0.0
    if _calls_python(answer):
        return 0.0
    # The answer cannot print a score: it does not know the secret.
    secret = secrets.token_hex(16)
    program = PROGRAM.format(entry=entry, secret=secret, answer=answer)
    printed = call(program, PythonLimits(), (*PACKAGES, COLUMN))
    _, marker, score = printed.rpartition(f"{secret} ")
    with suppress(ValueError):
        return float(score) if marker else 0.0
    return 0.0


def _calls_python(answer: str) -> bool:
    """Return True for an answer with a call of Python: an expression of mathematics has no attribute and few builtins.

    >>> [_calls_python(answer) for answer in ("2*(3 + 4)", "sin(x)**2", "max(1, 2)", "print(1)", "(x.real)", "[id, 1]")]
    [False, False, False, True, True, False]
    """
    # Python reads other letters of a name as these, such as the wide ones.
    text = unicodedata.normalize("NFKC", answer)
    return "(" in text and bool(ATTRIBUTE.search(text) or BUILTINS.intersection(re.findall(r"\w+", text)))

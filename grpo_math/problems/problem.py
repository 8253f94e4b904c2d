"""The type of a problem. datasets.py makes problems; every other package reads them."""

from typing import Any, TypedDict


class Problem(TypedDict, total=False):
    """A problem as `load_problems` returns it, with the other columns of the user's data.

    {"id": "mine/1", "prompt": [{"role": "user", "content": "Double 14."}], "problem": "Double 14.", "answer": "28",
    "answer_format": "boxed", "level": 1, "source": "a column of the file"}
    """

    id: str
    prompt: str | list[dict[str, Any]]  # the model's input, as text or as chat messages
    problem: str
    answer: str  # the gold answer
    answer_format: str  # the format that the prompt asks for: a name of grading/formats.py
    level: int | str | None
    subject: str | None
    tolerance: float | None  # accepted distance from the gold answer, in evaluation only

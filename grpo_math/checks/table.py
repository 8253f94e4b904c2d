"""The troubleshooting tables, made from the texts of the checks: `grpo-math doctor --table`.

The first table lists the conditions that are checked before a run. The second lists the symptoms of a run that does not
learn, each with cause and remedy.

Does not check a run: preflight.py and diagnosis.py do.
"""

from grpo_math.checks import diagnosis, preflight
from grpo_math.run.streams import Answer

Table = list[dict[str, str]]  # rows: column name -> cell


def tables() -> Answer:
    """Answer `grpo-math doctor --table`."""
    answer = {"before": before(), "during": during()}
    return Answer(answer, "\n\n".join(map(markdown, answer.values())))


def before() -> Table:
    """Return a row for each check before a run, in their order, with the first paragraph of its docstring.

    >>> before()[1]["check"]
    'versions'
    """
    checks = {**preflight.CHECKS, **preflight.WITH_TOKENIZER}
    return [
        {"check": name, "what has to hold": " ".join((check.__doc__ or "").split("\n\n")[0].split())}
        for name, check in checks.items()
    ]


def during() -> Table:
    """Return a row for each finding of a history.

    >>> during()[0]["what is seen"], during()[0]["remedy"]
    ('the reward does not rise', 'raise the learning rate')
    """
    return [
        {"finding": name, "what is seen": check.symptom, "cause": check.cause, "remedy": check.remedy}
        for name, check in diagnosis.CHECKS.items()
    ]


def markdown(table: Table) -> str:
    """Return a table as Markdown. The first column is set as code.

    >>> print(markdown([{"check": "disk", "what has to hold": "There is room."}]))
    | check | what has to hold |
    | --- | --- |
    | `disk` | There is room. |
    """
    rows = [[f"`{name}`", *cells] for name, *cells in (row.values() for row in table)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [list(table[0]), ["---"] * len(table[0]), *rows])

"""What `grpo-math evaluate` answers, as JSON and as text: one data set in full, or a table of several; of a run, base
and trained compared.

Does not evaluate: evaluation/ does.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_math.evaluation import compare, suite
from grpo_math.evaluation.figures import Results, text_of
from grpo_math.problems import contamination
from grpo_math.report import terminal

Sides = Mapping[str, Mapping[str, Results]]  # side ("" alone, or base and trained) -> data set -> its results


def answer(every: Sides, keys: Sequence[str]) -> tuple[dict[str, Any], str]:
    """The JSON object, with these keys of each results, and the text."""
    names = list(next(iter(every.values())))
    shown: dict[str, Any] = {}
    lines: list[str] = []
    for side, results in every.items():
        kept = {name: {key: of[key] for key in keys if key in of} for name, of in results.items()}
        shown[side] = kept[names[0]] if len(names) == 1 else kept
        lines += [*([side] if side else []), *_lines(results), *([""] if side else [])]
    if "base" not in every:
        return (shown[""] if len(names) == 1 else {"sets": shown[""]}), "\n".join(lines)
    before, after = every["base"], every["trained"]
    compared = {name: compare.comparison(before[name], after[name]) for name in names}
    if len(names) > 1:
        lines.append(suite.table_of_pairs(compared, before, after))
        return {**shown, "comparison": compared}, "\n".join(lines)
    (name,) = names
    lines.append(terminal.text_of(before[name], after[name], compared[name]))
    return {**shown, "comparison": compared[name]}, "\n".join(lines)


def _lines(results: Mapping[str, Results]) -> list[str]:
    several = len(results) > 1
    lines = [suite.table(results)] if several else []
    for name, of in results.items():
        lines += [] if several else [text_of(of)]
        if found := of.get("contamination"):
            lines.append(f"{name}: {contamination.text_of(found)}" if several else contamination.text_of(found))
        lines.append(f"results   {of['results']}")
    return lines

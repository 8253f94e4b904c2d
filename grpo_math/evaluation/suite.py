"""Evaluate several data sets, each as its authors do: template, number of samples, and one table for all sets.

results.py evaluates one set at a time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from grpo_math.errors import ConfigError, UserError, require_choice
from grpo_math.problems.prompts import Template
from grpo_math.problems.sources import DEFAULT_SOURCE, SOURCES, SUITES, listed, source_name


@dataclass(frozen=True)
class Sampling:
    """The sampling settings: ``samples`` completions of each problem at ``temperature``, where 0 is greedy."""

    samples: int = 1
    temperature: float = 0.0
    max_new_tokens: int = 512
    batch_size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("samples", "max_new_tokens", "batch_size"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(name, value, "evaluates nothing", "give 1 or more")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError("temperature", self.temperature, "is out of range", "0 is greedy, above 0 samples")
        if self.samples > 1 and self.temperature == 0:
            reason = "cannot be drawn at temperature 0"
            raise ConfigError("samples", self.samples, reason, "give 1, or a temperature above 0")


def sets(data: str | None, suite: str | None) -> list[str]:
    """Return the data sets that ``--data`` or ``--suite`` names. Raises `UserError` if none is named, or one twice.

    >>> sets("gsm8k,math500", None), sets(None, "math")[:2]
    (['gsm8k', 'math500'], ['gsm8k', 'math500'])
    """
    if data is not None and suite is not None:
        raise UserError("--suite would be ignored by --data: leave one of them out")
    if suite is not None:
        require_choice("suite", suite, tuple(SUITES))
        return list(SUITES[suite])
    if data is None:
        raise UserError("--data is missing: give a model and data, or two results files with --compare")
    names = listed(data)
    if "" in names or len(set(names)) < len(names):
        raise ConfigError("data", data, "names nothing, or one set twice", "give names with commas between them")
    return names


def evaluation_protocol(
    name: str, template: str | Template | None, samples: int | None, temperature: float | None
) -> tuple[str | Template, int, float]:
    """Return template, samples and temperature of a set: the given ones, else its authors'; one sample if greedy.

    >>> [evaluation_protocol(name, None, None, None)[1] for name in sets(None, "math")]
    [1, 1, 1, 1, 32, 32, 32]
    >>> evaluation_protocol("math-ai/aime25", None, 4, None), evaluation_protocol("owner/name", None, None, None)
    (('boxed', 4, 0.6), ('gsm8k', 1, 0.0))
    >>> evaluation_protocol("aime2024", None, None, None), evaluation_protocol("aime2024", "gsm8k", None, 0.0)
    (('boxed', 32, 0.6), ('gsm8k', 1, 0.0))
    """
    source = SOURCES.get(source_name(name) or "", DEFAULT_SOURCE)
    chosen_temperature = source.temperature if temperature is None else temperature
    # Greedy samples would all be equal.
    drawn = (source.samples if chosen_temperature > 0 else 1) if samples is None else samples
    return template or source.template, drawn, chosen_temperature


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a line for each set: accuracy (mean@n if there are several samples) with its 95% interval.

    The last column is the share of all completions that the length limit has cut, right ones included.

    >>> one = {"n": 30, "samples": 32, "accuracy": 0.25, "ci95": [0.12, 0.41], "accuracy_in_format": 0.2}
    >>> print(table({"aime2024": {**one, "categories": {"truncated": 96}}}))
                   n  mean@  accuracy   95% interval  in format    cut
    aime2024      30     32     25.0%  12.0 to 41.0%      20.0%  10.0%
    """
    rows = [["", "n", "mean@", "accuracy", "95% interval", "in format", "cut"]]
    for name, result in results.items():
        low, high = result["ci95"]
        shares = [f"{result['accuracy']:.1%}", f"{100 * low:.1f} to {high:.1%}", f"{result['accuracy_in_format']:.1%}"]
        rows.append([name, str(result["n"]), str(result["samples"]), *shares, f"{cut_share(result):.1%}"])
    if len(results) > 1:
        mean = fmean(result["accuracy"] for result in results.values())
        rows.append([f"mean of {len(results)}", "", "", f"{mean:.1%}", "", "", ""])
    return aligned(rows)


def cut_share(result: Mapping[str, Any]) -> float:
    """Return the share of completions that the length limit has cut."""
    # A right answer that was cut has the category of right ones.
    also = sum(bool(row.get("truncated")) and row["category"] != "truncated" for row in result.get("rows", ()))
    return float((result["categories"]["truncated"] + also) / (result["n"] * result.get("samples", 1)))


def comparison_table(
    compared: Mapping[str, Mapping[str, Any]], before: Mapping[str, Any], after: Mapping[str, Any]
) -> str:
    """Return a line for each set: base, trained, and the paired difference with its interval, in points."""
    rows = [["", "n", "mean@", "base", "trained", "difference", "95% paired interval"]]
    for name, pair in compared.items():
        shares = [f"{side[name]['accuracy']:.1%}" for side in (before, after)]
        rows.append([name, str(pair["n"]), str(before[name]["samples"]), *shares, *in_points(pair)])
    return aligned(rows)


def in_points(paired: Mapping[str, Any], suffix: str = "") -> list[str]:
    """Return a difference in points, and its interval.

    >>> in_points({"difference": 0.1, "ci95": [-0.02, 0.22]})
    ['+10.0 points', '[-2.0, +22.0]']
    """
    low, high = paired[f"ci95{suffix}"]
    return [f"{100 * paired[f'difference{suffix}']:+.1f} points", f"[{100 * low:+.1f}, {100 * high:+.1f}]"]


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return a table for the terminal: the first column begins on the left, the others end on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[0] = max(widths[0], 12)
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return "\n".join(line.rstrip() for line in lines)

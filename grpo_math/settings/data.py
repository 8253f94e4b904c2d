"""The problems, their prompt and the tools: settings and rules."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_math.settings.declare import Facts, Rule, setting
from grpo_math.system.table_files import is_table

# Values of prompt_template: the placeholder in a user's text, which alone makes the problem the user's message; and the
# prompt of the row, unchanged.
PROBLEM, AS_IS = "{problem}", "as_is"


FACTS: Facts = {"dataset_limit": {"ge": 1}}


@dataclass
class Data:
    """Problems and prompts."""

    dataset: str = setting(
        "generated",
        "The problems to train on: a known set (gsm8k, math, ...), owner/name[:config][@revision] on the Hub, a "
        "folder, a file, generated:LEVEL,LEVEL (sums, differences, products, long_products), or reasoning_gym:NAME.",
    )
    columns: str | None = setting(
        None,
        "The columns of dataset by their meaning, if their names are not the usual ones: "
        "problem=query,answer=meta.gold (also id, level and subject).",
    )
    dataset_split: str = setting(
        "train", "The split to train on, or a part of it: train[200:] leaves 200 to evaluate on."
    )
    dataset_limit: int | None = setting(None, "Train on at most this many problems, drawn by the seed.")
    skip_bad_rows: bool = setting(False, "Count and report bad rows, which grpo-math audit lists, instead of stopping.")
    prompt_template: str | None = setting(
        None,
        "The prompt: gsm8k, direct, boxed, r1_zero, xml or think; a text with {problem}; your own as "
        "module:function; or as_is, the column prompt unchanged. Default: gsm8k, or {problem} alone with a "
        "system_prompt.",
    )
    system_prompt: str | None = setting(
        None, "A text or a file that replaces the template's system message, for a model with its own (Qwen2.5-Math)."
    )
    answer_format: str | None = setting(
        None,
        "The form in which the prompt asks for the answer, by the name of its template. Default: the template's, "
        "or the form whose tags the prompt shows, or boxed.",
    )


def dataset_as_text(dataset: str | Mapping[str, Any]) -> str:
    """Return a data set as a text. A recipe may give a generator's parameters as a mapping.

    >>> dataset_as_text({"reasoning_gym:chain_sum": {"min_terms": 2}})
    'reasoning_gym:chain_sum {"min_terms": 2}'
    """
    return (
        " ".join(f"{name} {json.dumps(parameters)}" for name, parameters in dataset.items())
        if isinstance(dataset, Mapping)
        else dataset
    )


def columns_as_text(requested: str | Mapping[str, str] | None) -> str | None:
    """Return requested columns as a text.

    >>> columns_as_text({"problem": "query", "answer": "meta.gold"})
    'problem=query,answer=meta.gold'
    """
    return (
        ",".join(f"{name}={column}" for name, column in requested.items())
        if isinstance(requested, Mapping)
        else requested
    )


PROGRAM_RULES = [
    Rule(
        "no_effect",
        "dataset_split",
        lambda s: is_table(s.dataset) and "[" not in s.dataset_split,
        "a file has one split",
        "leave it out, or cut the file: train[200:]",
    )
]

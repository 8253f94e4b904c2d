"""A model or adapter on a problem set -> results: accuracy with its interval, categories, and every completion.

An answer counts only within the format that the prompt asked for (the rule of the r1_zero reward); how often it was
right in any form stands beside it as ``answer_accuracy``. The same prompt and the same grader serve before and after.

Does not compare two results: report/compare.py does.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.grading import Grade, Verdict, grade_batch
from grpo_math.metrics import CATEGORIES
from grpo_math.rollout import Completion, complete
from grpo_math.stats import maj_at_k, mean_at_n, pass_at_k, wilson

SCHEMA = 1


def category(grade: Grade, truncated: bool) -> str:
    """Which of `CATEGORIES` a completion falls in.

    >>> category(Grade(Verdict.CORRECT, "7", in_format=False), truncated=False)
    'correct_answer_bad_format'
    >>> category(Grade(Verdict.WRONG, "8", in_format=True), truncated=True)
    'truncated'
    """
    if grade.verdict.ungradable:
        return "ungradable"
    if grade.verdict is Verdict.CORRECT:
        return "correct" if grade.in_format else "correct_answer_bad_format"
    if truncated:
        return "truncated"
    return "wrong_answer" if grade.in_format else "bad_format"


def answered(
    model: Any,
    tokenizer: Any,
    rows: Sequence[dict[str, Any]],
    *,
    samples: int,
    temperature: float,
    max_new_tokens: int,
    batch_size: int,
    seed: int,
    grade_timeout: float,
    progress: bool,
) -> tuple[list[Completion], list[Grade]]:
    """``samples`` completions of each row, row after row, and their grades."""
    repeated = [row for row in rows for _ in range(samples)]
    completions = complete(
        model,
        tokenizer,
        [row["prompt"] for row in repeated],
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        seed=seed,
        progress=progress,
    )
    grades = grade_batch(
        [row["answer"] for row in repeated],
        [completion.text for completion in completions],
        answer_format=[row.get("answer_format") for row in repeated],
        timeout=grade_timeout,
    )
    return completions, grades


def evaluate(
    model: Any,
    rows: Sequence[dict[str, Any]],
    *,
    tokenizer: Any = None,
    adapter: str | None = None,
    samples: int = 1,
    temperature: float = 0.0,
    max_new_tokens: int = 512,
    batch_size: int = 32,
    seed: int = 0,
    grade_timeout: float = 5.0,
    progress: bool = True,
    output: str | Path | None = None,
    about: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Results of ``model`` (a name, or a loaded model with its ``tokenizer``) on rows of `data.load_problems`.

    ``samples`` completions of each problem are drawn at ``temperature``; 0 is greedy and takes one sample.
    ``accuracy`` is the share of completions that are right and in the format, with Wilson's 95% interval for one
    sample a problem and the normal one over problems for several. ``output`` names the file that the results are
    written to; ``about`` adds facts to them.
    """
    if not rows:
        raise ConfigError("rows", 0, "leaves nothing to evaluate on", "give at least one problem")
    if samples < 1 or (samples > 1 and temperature == 0):
        raise ConfigError("samples", samples, f"cannot be drawn at temperature {temperature:g}", "greedy takes 1")
    started = time.perf_counter()
    if isinstance(model, str):
        model, tokenizer, adapter_name = *_load(model, adapter), adapter
    else:
        adapter_name = adapter
    completions, grades = answered(
        model,
        tokenizer,
        rows,
        samples=samples,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        seed=seed,
        grade_timeout=grade_timeout,
        progress=progress,
    )
    records = [
        _record(rows[i // samples], completion, grade)
        for i, (completion, grade) in enumerate(zip(completions, grades, strict=True))
    ]
    results = {
        "schema": SCHEMA,
        "model": getattr(model.config, "_name_or_path", "") or "in memory",
        "adapter": adapter_name,
        "template": rows[0].get("answer_format"),
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "samples": samples,
        "seed": seed,
        **summary(records, samples),
        "seconds": round(time.perf_counter() - started, 2),
        "versions": {name: metadata.version(name) for name in ("torch", "transformers", "trl", "peft", "math-verify")},
        "prompt_of_first_row": rows[0]["prompt"],
        **(about or {}),
        "rows": records,
    }
    if output is not None:
        write_json(output, results)
        results["results"] = str(output)
    return results


def summary(records: Sequence[dict[str, Any]], samples: int = 1) -> dict[str, Any]:
    """The figures over graded records, ``samples`` consecutive ones for each problem.

    >>> rows = [{"category": "correct", "verdict": "correct", "answer": "7"}, {"category": "bad_format",
    ...          "verdict": "no_answer", "answer": None}]
    >>> figures = summary(rows)
    >>> figures["n"], figures["accuracy"], figures["answer_accuracy"], figures["pass@k"]
    (2, 0.5, 0.5, {'1': 0.5})
    """
    problems = [records[i : i + samples] for i in range(0, len(records), samples)]
    right = [[record["category"] == "correct" for record in problem] for problem in problems]
    scores = [[float(flag) for flag in flags] for flags in right]
    mean, error = mean_at_n(scores)
    if samples == 1:
        interval = wilson(sum(map(sum, right)), len(problems))
    else:
        interval = (mean - 1.96 * (error or 0.0), mean + 1.96 * (error or 0.0))
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64, 128, 256) if k <= samples]
    counts = Counter(record["category"] for record in records)
    return {
        "n": len(problems),
        "accuracy": mean,
        "ci95": [max(0.0, interval[0]), min(1.0, interval[1])],
        "answer_accuracy": sum(record["verdict"] == Verdict.CORRECT for record in records) / len(records),
        "categories": {name: counts[name] for name in CATEGORIES},
        "pass@k": {str(k): sum(pass_at_k(samples, sum(flags), k) for flags in right) / len(right) for k in ks},
        "maj@k": {
            str(k): sum(
                maj_at_k([record["answer"] for record in problem], flags, k)
                for problem, flags in zip(problems, right, strict=True)
            )
            / len(problems)
            for k in ks
        },
    }


def _record(row: dict[str, Any], completion: Completion, grade: Grade) -> dict[str, Any]:
    return {
        "id": row["id"],
        "problem": row["problem"],
        "gold": row["answer"],
        "completion": completion.text,
        "verdict": str(grade.verdict),
        "answer": grade.answer,
        "in_format": grade.in_format,
        "category": category(grade, completion.truncated),
        "tokens": completion.tokens,
        "truncated": completion.truncated,
    }


def _load(name: str, adapter: str | None) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    from grpo_math.models import fast_dtype, load_tokenizer, model_path

    path = model_path(name)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=fast_dtype())
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    if torch.cuda.is_available():
        model = model.to("cuda")
    return model, load_tokenizer(path)


def write_json(path: str | Path, content: Any) -> None:
    """Write beside the target and rename: a reader never sees half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.part")
    scratch.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)

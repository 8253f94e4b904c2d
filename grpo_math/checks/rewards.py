"""Checks of the rewards: gold answers can be graded, and rewards pay a right answer more than a wrong one.

The checks use made-up completions in the template's format. Does not ask a model.
"""

import asyncio
import inspect
import os
import re
import time
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

from grpo_math.checks.setup import CheckResult, Setup
from grpo_math.errors import ConfigError, RewardError
from grpo_math.grading import Verdict, grade_batch
from grpo_math.grading.equal.compare import is_text_only
from grpo_math.grading.formats import made_up
from grpo_math.grading.where import gold_answer
from grpo_math.problems import contamination
from grpo_math.problems.of_recipe import naming
from grpo_math.rewards import load_reward
from grpo_math.rewards.guard import checked
from grpo_math.settings.batch import plan

GOLDS = 200  # gold answers of the data that are graded against themselves
PAIRS = 8  # right and wrong completions that test the rewards
SECONDS = 10.0  # time limit of a reward function for these completions
SURE = 1e-9  # a right answer has to be paid more than a wrong one by this much
BAD_SHARE = 0.02  # up to this share of bad gold answers there is no warning
CORRECT = "correct these answers, or leave the rows out"
JUDGE = ("OPENAI_BASE_URL", "GRPO_MATH_JUDGE_MODEL")


def problems(setup: Setup) -> Iterator[CheckResult]:
    """There are problems, each with one gold answer, and held-out ones are as many as asked for and not trained on."""
    rows, overlap = setup.problems.rows, setup.problems.overlap
    yield CheckResult("info", f"{len(rows)} problems to train on")
    if evaluated := setup.problems.about_eval:
        yield CheckResult("info", evaluated)
    for one in setup.problems.during:
        yield CheckResult("info", f"{len(one.rows)} problems of {one.data}, {one.split}, are evaluated during training")
    first = {row["problem"]: row for row in reversed(rows)}
    pairs = [(first[row["problem"]], row) for row in rows if row["answer"] != first[row["problem"]]["answer"]][:GOLDS]
    grades = _grades([one["answer"] for one, _ in pairs], [other["answer"] for _, other in pairs], "boxed")
    if apart := [pair for pair, verdict in zip(pairs, grades, strict=True) if verdict is not Verdict.CORRECT]:
        (one, other), n = apart[0], len({one["problem"] for one, _ in apart})
        example = f"{one['id']} has {one['answer'][:60]!r}, {other['id']} has {other['answer'][:60]!r}"
        yield CheckResult(
            "warning", f"{n} problem{'s have' if n > 1 else ' has'} different gold answers: {example}", CORRECT
        )
    if overlap and overlap["overlapping"]:
        level = "warning" if overlap["equal"] else "info"
        yield CheckResult(level, contamination.text_of(overlap), "give an eval_split or eval_dataset of other problems")


def batch(setup: Setup) -> Iterator[CheckResult]:
    """Prompts x completions come out even over processes and steps, and there are problems for a step."""
    counted = plan(setup.settings, setup.given, setup.processes)
    yield CheckResult("info", counted.line("process"))
    counted.refuse_few(len(setup.problems.rows), "dataset", setup.settings["dataset"])
    if counted.total == counted.generations:
        yield CheckResult("warning", "a step has 1 prompt, so its gradient is mostly noise", "prompts_per_step: 16")


def golds(setup: Setup) -> Iterator[CheckResult]:
    """A gold answer, given as a completion in the template's format, is graded right."""
    rows = setup.problems.sample(GOLDS)
    answers = [row["answer"] for row in rows]
    verdicts = _grades(answers, answers, setup.problems.template.answer_format)
    bad = [(row, verdict) for row, verdict in zip(rows, verdicts, strict=True) if verdict is not Verdict.CORRECT]
    wrong = {str(row["answer"]) for row, _ in bad}
    if texts := [text for answer in answers if answer not in wrong and is_text_only(text := gold_answer(str(answer)))]:
        shown = ", ".join(repr(text[:60]) for text in texts[:3])
        yield CheckResult(
            "info", f"{len(texts)} of {len(rows)} gold answers are compared as text only, such as {shown}"
        )
    if bad:
        row, first = bad[0]
        message = f"{len(bad)} of {len(rows)} gold answers are not right when graded against themselves"
        example = f"the first is {row['id']}, {row['answer'][:60]!r}: {first}"
        level = "error" if len(bad) == len(rows) else "warning" if len(bad) > BAD_SHARE * len(rows) else "info"
        yield CheckResult(level, f"{message}; {example}", CORRECT)


def _grades(golds: list[Any], answers: list[Any], answer_format: str) -> list[Verdict]:
    """Return the verdict on each answer, given as a completion in the format."""
    texts = [made_up(answer, answer_format) for answer in answers]
    return [grade.verdict for grade in grade_batch(golds, texts, answer_format=answer_format)]


def rewards(setup: Setup) -> Iterator[CheckResult]:
    """Each reward function runs, and their weighted sum pays right completions more than wrong ones of equal length."""
    s = setup.settings
    names, weights = s["rewards"] or [], s["reward_weights"]
    if not names or not any(weights or names) or len(weights or names) != len(names):
        return  # settings() has reported it
    with naming({"reward_funcs": "rewards"}):
        functions = [load_reward(name) for name in names]
    if "llm_judge" in names and (unset := [name for name in JUDGE if not os.environ.get(name)]):
        remedy = "set it: the judge is an OpenAI-compatible server"
        raise ConfigError("rewards", "llm_judge", f"needs the variable {unset[0]}", remedy)
    trial = _trial(setup)
    if not trial.rows:
        return  # golds() has reported it
    totals = [0.0] * len(trial.texts)
    for name, function, weight in zip(names, functions, weights or [1.0] * len(names), strict=True):
        if name == "llm_judge":
            continue  # asks a model that may cost money
        started = time.monotonic()
        values = _pay(function, setup, trial)
        if time.monotonic() - started > SECONDS:
            message = f"reward {name} took over {SECONDS:g} seconds for {len(trial.texts)} completions"
            yield CheckResult("warning", message, "speed it up")
        if len(names) == 1 and all(value is None for value in values):
            message = f"reward function {name} returned None for every completion"
            yield CheckResult("error", message, "return a number for those that it is for")
            return
        totals = [total + weight * (value or 0.0) for total, value in zip(totals, values, strict=True)]
    if "llm_judge" not in names:
        yield from _judged(setup, trial, totals)


class Trial(NamedTuple):
    """Rows, and three made-up completions of each: first all right ones, then all wrong ones, then right ones outside
    the format. ``outside`` lists the rows whose completion outside the format was graded right."""

    rows: list[Mapping[str, Any]]
    texts: list[str]
    outside: list[int]


def _trial(setup: Setup) -> Trial:
    """Return rows whose completions get the intended grades. A wrong completion is as long as the right one."""
    answer_format = setup.problems.template.answer_format
    rows: list[Mapping[str, Any]] = []
    right, wrong, outside = [], [], []
    for row in setup.problems.sample(GOLDS)[: 4 * PAIRS]:
        gold = row["answer"]
        texts = [made_up(gold, answer_format), made_up(_other(gold), answer_format), f"The answer is {gold}."]
        correct, other, free = grade_batch([gold] * 3, texts, answer_format=answer_format)
        if (correct.verdict, other.verdict) == (Verdict.CORRECT, Verdict.WRONG) and len(rows) < PAIRS:
            if free.verdict is Verdict.CORRECT and not free.in_format:
                outside.append(len(rows))
            rows.append(row)
            right.append(texts[0])
            wrong.append(texts[1])
    return Trial(rows, [*right, *wrong, *(f"The answer is {row['answer']}." for row in rows)], outside)


def _judged(setup: Setup, trial: Trial, totals: list[float]) -> Iterator[CheckResult]:
    """Compare the rewards of right, wrong and unformatted completions."""
    n, names, answer_format = len(trial.rows), setup.settings["rewards"], setup.problems.template.answer_format
    right, wrong, outside = totals[:n], totals[n : 2 * n], totals[2 * n :]
    named, apart = ", ".join(names), sum(right) - sum(wrong)
    example = f"such as {trial.texts[0]!r} and {trial.texts[n]!r}"
    if all(r < w - SURE for r, w in zip(right, wrong, strict=True)):
        remedy = "look at the sign of the rewards and of reward_weights"
        yield CheckResult("error", f"a wrong answer is paid more than a right one by {named}, {example}", remedy)
    elif apart <= SURE:
        how = "both are paid the same" if apart >= -SURE else "a wrong answer is paid as well on average"
        message = f"the rewards ({named}) cannot tell right from wrong: {how}, {example}"
        yield CheckResult("warning", message, f"rewards: [{', '.join(['accuracy', *names])}]")
    elif trial.outside and sum(outside[i] - right[i] for i in trial.outside) >= -SURE:
        message = (
            f"a right answer outside the {answer_format} format is paid as well as one within it, such as "
            f"{trial.texts[2 * n + trial.outside[0]]!r}: accuracy counts both, accuracy_in_format the second alone"
        )
        gated = ", ".join(dict.fromkeys([*names, "gated"]))
        yield CheckResult("info", message, f"where the format matters, rewards: [{gated}]")


def _other(gold: str) -> str:
    """Return a wrong answer of the same length.

    >>> _other("72"), _other("1/3"), _other("(C)")
    ('83', '2/4', '000')
    """
    return re.sub(r"\d", lambda digit: str(int(digit[0]) % 9 + 1), gold) if re.search(r"\d", gold) else "0" * len(gold)


def _pay(function: Any, setup: Setup, trial: Trial) -> list[Any]:
    """Return the function's reward of each completion. The function is called as in training."""
    s, rows, texts = setup.settings, trial.rows * 3, trial.texts
    chat = not isinstance(rows[0]["prompt"], str)
    columns: dict[str, Any] = {
        **{key: [row[key] for row in rows] for key in rows[0] if key != "prompt"},
        "prompts": [row["prompt"] for row in rows],
        "completions": [[{"role": "assistant", "content": text}] for text in texts] if chat else texts,
        "grade": grade_batch(
            [row["answer"] for row in rows], texts, answer_format=setup.problems.template.answer_format
        ),
        "completion_ids": [list(text.encode()) for text in texts],
        "max_completion_length": s["max_completion_length"],
        "grade_timeout": s["grade_timeout"],
        "trainer_state": SimpleNamespace(global_step=0, max_steps=s["max_steps"], epoch=0.0),
        "log_extra": lambda *_: None,
        "log_metric": lambda *_: None,
    }
    try:
        called = checked(function)(**columns)
        return asyncio.run(called) if inspect.iscoroutine(called) else called
    except RewardError as error:
        remedy = ": training stops instead of assuming a reward of 0"  # of rewards/guard.py
        raise RewardError(str(error).replace(remedy, ": correct the function")) from None

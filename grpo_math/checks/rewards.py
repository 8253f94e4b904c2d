"""Checks of what a run rewards: golds that can be graded, and rewards that pay a right answer more than a wrong one.

Both are tried on made-up completions in the template's format. Does not ask a model.
"""

import asyncio
import inspect
import os
import re
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from grpo_math.checks.setup import Said, Setup, naming
from grpo_math.errors import ConfigError, RewardError, UserError
from grpo_math.grading import Verdict, grade_batch
from grpo_math.grading.formats import made_up
from grpo_math.problems import contamination
from grpo_math.rewards import load_reward
from grpo_math.rewards.guard import checked

GOLDS = 200  # of the data that are graded against themselves
PAIRS = 8  # right and wrong completions that the rewards are tried on
SECONDS = 10.0  # that a reward function may take for them
SURE = 1e-9  # by which a right answer has to be paid more
BAD_SHARE = 0.02  # of the golds; below, the rest trains


def problems(setup: Setup) -> Iterator[Said]:
    """There are problems, held-out ones are as many as asked for, and these are not trained on."""
    rows, overlap = setup.rows, setup.overlap
    yield Said("info", f"{len(rows)} problems to train on", "", {"problems": len(rows)})
    if about := setup.about_eval:
        yield Said("info", about, "")
    if overlap and overlap["overlapping"]:
        level = "warning" if overlap["equal"] else "info"
        yield Said(level, contamination.text_of(overlap), "give an eval_split or eval_dataset of other problems")


def golds(setup: Setup) -> Iterator[Said]:
    """A gold answer, given as a completion in the template's format, is graded right."""
    rows = setup.sample(GOLDS)
    template = setup.settings["template"]
    answers = [row["answer"] for row in rows]
    grades = grade_batch(answers, [made_up(answer, template) for answer in answers], answer_format=template)
    bad = [(row, g) for row, g in zip(rows, grades, strict=True) if g.verdict is not Verdict.CORRECT]
    if not bad:
        return
    row, first = bad[0]
    said = f"{len(bad)} of {len(rows)} gold answers are not right when graded against themselves"
    example = f"the first is {row['id']}, {row['answer'][:60]!r}: {first.verdict}"
    level = "error" if len(bad) == len(rows) else "warning" if len(bad) > BAD_SHARE * len(rows) else "info"
    yield Said(level, f"{said}; {example}", "correct these answers, or leave the rows out", {"bad": len(bad)})


def rewards(setup: Setup) -> Iterator[Said]:
    """Each reward function runs, and their weighted sum pays right completions more than wrong ones of equal length."""
    s = setup.settings
    names, weights = s["rewards"], s["reward_weights"]
    if not names:
        raise ConfigError("rewards", names, "is empty", "name a reward function, such as accuracy")
    if weights is not None and len(weights) != len(names):
        reason = f"are {len(weights)} weights for {len(names)} reward functions"
        raise ConfigError("reward_weights", weights, reason, "give one weight for each")
    if weights is not None and not any(weights):
        raise ConfigError("reward_weights", weights, "pay nothing", "leave them out, or give one above 0")
    for name in names:
        if names.count(name) > 1:
            raise ConfigError("rewards", name, "is given twice", "name it once, with a weight in reward_weights")
    with naming({"reward_funcs": "rewards"}):
        functions = [(name, load_reward(name)) for name in names]
    if "llm_judge" in names:
        for variable in ("OPENAI_BASE_URL", "GRPO_MATH_JUDGE_MODEL"):
            if not os.environ.get(variable):
                raise ConfigError(
                    "rewards",
                    "llm_judge",
                    f"needs the variable {variable}",
                    "set it: the judge is an OpenAI-compatible server",
                )
    rows, right, wrong = _pairs(setup)
    if not rows:
        return  # golds() has said why
    paid, totals = {}, [0.0] * (2 * len(rows))
    for number, (name, function) in enumerate(functions):
        if name == "llm_judge":
            continue  # asks a model that may cost money
        values = _run(name, function, setup, rows + rows, right + wrong)
        if values is None:
            said = f"reward {name} took over {SECONDS:g} seconds for {2 * len(rows)} completions"
            yield Said("warning", said, "speed it up")
            return
        if len(functions) == 1 and all(value is None for value in values):
            said = f"reward function {name} returned None for every completion"
            yield Said("error", said, "return a number for those that it is for")
            return
        weight = weights[number] if weights else 1.0
        weighted = [weight * (value or 0.0) for value in values]
        totals = [total + value for total, value in zip(totals, weighted, strict=True)]
        paid[name] = [sum(half) / len(rows) for half in (weighted[: len(rows)], weighted[len(rows) :])]
    if len(paid) < len(functions):
        return
    apart = sum(r for r, _ in paid.values()) - sum(w for _, w in paid.values())
    named = ", ".join(paid)
    example = f"such as {made_up(rows[0]['answer'], s['template'])!r} and {wrong[0]!r}"
    if all(r < w - SURE for r, w in zip(totals[: len(rows)], totals[len(rows) :], strict=True)):
        remedy = "look at the sign of the rewards and of reward_weights"
        yield Said("error", f"a wrong answer is paid more than a right one by {named}, {example}", remedy, paid)
    elif apart <= SURE:
        how = "both are paid the same" if apart >= -SURE else "a wrong answer is paid as well on average"
        said = f"the rewards ({named}) cannot tell right from wrong: {how}, {example}"
        yield Said("warning", said, f"rewards: [{', '.join(['accuracy', *names])}]", paid)
    else:
        yield from _outside(setup, functions, weights or [1.0] * len(functions))


def _outside(setup: Setup, functions: list[tuple[str, Any]], weights: list[float]) -> Iterator[Said]:
    """Whether a right answer outside the format is paid as much as one within it."""
    template = setup.settings["template"]
    rows, right, _ = _pairs(setup)
    texts = [f"The answer is {row['answer']}." for row in rows]
    grades = grade_batch([row["answer"] for row in rows], texts, answer_format=template)
    known = [i for i, g in enumerate(grades) if g.verdict is Verdict.CORRECT and not g.in_format]
    totals = [0.0] * (2 * len(known))
    for (name, function), weight in zip(functions, weights, strict=True):
        tried = [rows[i] for i in known] * 2
        values = _run(name, function, setup, tried, [right[i] for i in known] + [texts[i] for i in known])
        if values is None:
            return
        totals = [total + weight * (value or 0.0) for total, value in zip(totals, values, strict=True)]
    within, outside = sum(totals[: len(known)]), sum(totals[len(known) :])
    if known and outside >= within - SURE:
        said = (
            f"a right answer outside the {template} format is paid as well as one within it, such as "
            f"{texts[known[0]]!r}: accuracy counts both, accuracy_in_format the second alone"
        )
        names = dict.fromkeys([*(name for name, _ in functions), "gated"])
        remedy = f"where the format matters, rewards: [{', '.join(names)}]"
        yield Said("info", said, remedy, {"within": within / len(known), "outside": outside / len(known)})


def _pairs(setup: Setup) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """Rows, a right completion of each, and a wrong one of the same length: every digit is another, or all is 0."""
    template = setup.settings["template"]
    rows = setup.sample(GOLDS)[: 4 * PAIRS]
    golds_ = [row["answer"] for row in rows]
    right = [made_up(gold, template) for gold in golds_]
    wrong = [made_up(_other(gold), template) for gold in golds_]
    verdicts = [grade.verdict for grade in grade_batch(golds_ + golds_, right + wrong, answer_format=template)]
    judged = enumerate(zip(verdicts[: len(rows)], verdicts[len(rows) :], strict=True))
    good = [i for i, both in judged if both == (Verdict.CORRECT, Verdict.WRONG)][:PAIRS]
    return [rows[i] for i in good], [right[i] for i in good], [wrong[i] for i in good]


def _other(gold: str) -> str:
    """
    >>> _other("72"), _other("1/3"), _other("(C)")
    ('83', '2/4', '000')
    """
    return re.sub(r"\d", lambda digit: str(int(digit[0]) % 9 + 1), gold) if re.search(r"\d", gold) else "0" * len(gold)


def _run(name: str, function: Any, setup: Setup, rows: list[dict[str, Any]], texts: list[str]) -> list[Any] | None:
    """What the function pays, called as training calls it; None where it takes too long."""
    s = setup.settings
    chat = not isinstance(rows[0]["prompt"], str)
    completions: list[Any] = [[{"role": "assistant", "content": text}] for text in texts] if chat else texts
    grades = grade_batch([row["answer"] for row in rows], texts, answer_format=s["template"])
    columns: dict[str, Any] = {
        **{key: [row[key] for row in rows] for key in rows[0] if key != "prompt"},
        "grade": grades,
        "completion_ids": [list(text.encode()) for text in texts],
        "max_completion_length": s["max_completion_length"],
        "grade_timeout": s["grade_timeout"],
        "trainer_state": SimpleNamespace(global_step=0, max_steps=s["max_steps"], epoch=0.0),
        "log_extra": lambda *_: None,
        "log_metric": lambda *_: None,
    }
    outcome: list[Any] = []

    def call() -> None:
        try:
            called = checked(function)(prompts=[row["prompt"] for row in rows], completions=completions, **columns)
            outcome.append(asyncio.run(called) if inspect.iscoroutine(called) else called)
        except UserError as error:
            outcome.append(error)
        except BaseException as error:  # sys.exit in a reward would end this thread without a word
            outcome.append(RewardError(f"reward function {name} raised {type(error).__name__}: correct the function"))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(SECONDS)
    if outcome and isinstance(outcome[0], RewardError):
        remedy = ": training stops, since a zero here would be invented"  # of rewards/guard.py
        raise RewardError(str(outcome[0]).replace(remedy, ": correct the function"))
    if outcome and isinstance(outcome[0], UserError):
        raise outcome[0]
    return outcome[0] if outcome else None

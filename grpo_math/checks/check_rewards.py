"""Checks of the rewards: gold answers can be graded, and rewards are higher for a correct answer than for a wrong one.

The checks use made-up completions in the template's format.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress, islice
from types import SimpleNamespace
from typing import Any

from grpo_math.checks.golds import DAMAGED, decimal_commas, in_words, is_damaged, is_own_text, plain, readings
from grpo_math.checks.setup import Setup
from grpo_math.errors import ConfigError, Finding, RewardError
from grpo_math.evaluation.stats import wilson
from grpo_math.evaluation.suite import Sampling, evaluation_protocol
from grpo_math.grading import Grade, Verdict, grade_batch
from grpo_math.grading.equal.text import repaired
from grpo_math.grading.formats import example_completion
from grpo_math.problems import contamination
from grpo_math.problems.from_recipe import HELDOUT_N, renamed_error_fields
from grpo_math.problems.problem import Problem
from grpo_math.problems.prompts import AS_IS, CHAT_TOKENS
from grpo_math.problems.sources import folder_name
from grpo_math.problems.stored import cached_with_rows, repeated, rows_with
from grpo_math.rewards import load_reward
from grpo_math.rewards.functions import SHIPPED
from grpo_math.rewards.guard import guarded
from grpo_math.rewards.inputs import GRADE, GRADE_TIMEOUT, GROUPS, MAX_LENGTH, grouped, is_right
from grpo_math.settings.batch import resolve_batch
from grpo_math.system.user_functions import start

GOLDS = 200  # gold answers of the data that are graded against themselves
ENOUGH = 50  # problems of an evaluation: the interval of an accuracy of 50% is 26 points wide
PAIRS = 8  # right and wrong completions that test the rewards
SURE = 1e-9  # the reward of a correct answer has to be higher by this much
FEW = 0.02  # up to this share of bad gold answers there is no warning
BAD_SHARE = 0.1  # more bad gold answers are an error
CORRECT = "correct these answers, or leave the rows out"
OWN_TEXT = "correct only in their own text"
BY_TEXT = "compared as text, so that nobody matches them in other words"
BARE = "grpo-math audit DATA --write_clean FILE --bare_numbers writes the numbers alone"


def problems(setup: Setup) -> Iterator[Finding]:
    """Each problem has one gold answer. The held-out problems are as many as requested, and none is trained on."""
    rows, (before_after, during, line) = setup.problems.rows, setup.problems.evaluation
    yield Finding("info", f"{len(rows)} problem{'s' * (len(rows) != 1)} to train on")
    yield from (Finding("warning", note) for note in setup.problems.notes)
    if line:
        yield Finding("info", line)
    for heldout in during:
        yield Finding(
            "info", f"{len(heldout.rows)} problems of {heldout.data}, {heldout.split}, are evaluated during training"
        )
        with renamed_error_fields({name: f"heldout.{name}" for name in ("samples", "temperature")}):
            Sampling(*evaluation_protocol(heldout.data, None, heldout.samples, heldout.temperature)[1:])
    yield from _few_to_evaluate(setup)
    # One of the two gold answers rewards a wrong answer.
    n, example = cached_with_rows(rows, "contradictions", lambda: _contradictory(rows))
    if n:
        yield Finding("warning", f"problems with different gold answers: {n}; {example}", CORRECT)
    n, first = cached_with_rows(rows, "templated", lambda: _templated(rows))
    if n and setup.problems.template.name != AS_IS:
        message = f"problems that contain a chat template already: {n}; the first is {first}"
        yield Finding("warning", f"{message}; the prompt becomes a chat in a chat", "prompt_template: as_is")
    # The problems of before and after, which the default set has, are compared already.
    compared = {row["problem"] for row in before_after.rows} if before_after else set()
    others = [heldout for heldout in during if not {row["problem"] for row in heldout.rows} <= compared]
    sets = {f"{heldout.data}, {heldout.split}: ": heldout.rows for heldout in others}
    for name, overlap in {"": setup.problems.overlap, **setup.problems.overlaps(sets)}.items():
        if overlap and overlap["overlapping"]:
            level = "warning" if overlap["equal"] else "info"
            remedy = "give an eval_split, eval_dataset or heldout of other problems"
            yield Finding(level, name + contamination.overlap_line(overlap), remedy)


def _few_to_evaluate(setup: Setup) -> Iterator[Finding]:
    """Say how little the accuracy on a few problems tells, unless the recipe names these problems for an evaluation
    during training alone, with as many samples as it wants."""
    s, (before_after, during, _) = setup.settings, setup.problems.evaluation
    evaluated = [before_after] if before_after else during * (not s.heldout)
    for heldout in evaluated:
        n = len(heldout.rows)
        if n < ENOUGH:
            lo, hi = wilson(n / 2, n)
            tells = f"50% on {n} problem{'s' * (n != 1)} has the 95% interval {lo:.0%} to {hi:.0%}"
            remedy = f"evaluate {ENOUGH} problems or more: a larger file, or another eval_dataset"
            yield Finding("info" if s.eval_n == n else "warning", f"the evaluation tells little: {tells}", remedy)
    if during and (s.keeps_best or s.load_best_model_at_end or s.save_strategy == "best"):
        metric = str(s.metric_for_best_model)
        chooses = next((one for one in during if metric.startswith(f"eval_{folder_name(one.data)}_")), during[0])
        if len(chooses.rows) < HELDOUT_N:
            message = f"{len(chooses.rows)} problems choose the best checkpoint, so chance decides between close ones"
            remedy = f"let {HELDOUT_N} choose: heldout: [{{data: {chooses.data}, n: {HELDOUT_N}}}]"
            yield Finding("warning", message, remedy)


def _contradictory(rows: Iterable[Mapping[str, Any]]) -> tuple[int, str]:
    """Return the number of problems with different gold answers, and an example in words."""
    pairs = contradictions(rows, GOLDS)
    examples = [
        f"{one['id']} has {one['answer'][:60]!r}, {other['id']} has {other['answer'][:60]!r}" for one, other in pairs
    ]
    return len({one["problem"] for one, _ in pairs}), "".join(examples[:1])


def _templated(rows: Iterable[Mapping[str, Any]]) -> tuple[int, str]:
    """Return the number of problems that contain a chat template, and the id of the first."""
    ids = [row["id"] for row in rows_with(rows, "id", "problem") if CHAT_TOKENS.search(row["problem"])]
    return len(ids), "".join(ids[:1])


def contradictions(rows: Iterable[Mapping[str, Any]], most: int | None = None) -> list[tuple[Any, Any]]:
    """Return pairs of rows with the same problem and gold answers that are not equal. ``most`` pairs are graded."""
    # Hashes, because a million problems take much memory, and few of them are repeated.
    several = repeated(hash(contamination.whole(row["problem"])) for row in rows_with(rows, "problem"))
    same = compress(rows_with(rows, "id", "problem", "answer") if several.any() else (), several)
    first: dict[str, Any] = {}
    compared = ((first.setdefault(contamination.whole(row["problem"]), row), row) for row in same)
    pairs = list(islice((pair for pair in compared if pair[0]["answer"] != pair[1]["answer"]), most))
    results = verdicts([one["answer"] for one, _ in pairs], [other["answer"] for _, other in pairs], "boxed")
    return [pair for pair, verdict in zip(pairs, results, strict=True) if verdict is not Verdict.CORRECT]


def batch(setup: Setup) -> Iterator[Finding]:
    """Prompts x completions come out even over processes and steps, and there are problems for a step."""
    size = resolve_batch(setup.settings, setup.processes)
    yield Finding("info", size.line("process"))
    size.refuse_few(len(setup.problems.rows), "dataset", setup.settings.dataset)
    s, surrogate = setup.settings, setup.settings.effective_surrogate
    is_ratio_one = size.total % size.rollout == 0 and s.num_iterations == 1 and not s.staleness
    # With vLLM, these surrogates compare with the sampler.
    measures = s.use_vllm and surrogate in ("vespo", "dppo", "dppo_kl")
    needs_ratio = surrogate not in ("clip", "reinforce") or s.importance_sampling_level == "sequence" or s.delta
    if is_ratio_one and needs_ratio and not measures:
        # A surrogate of the user may be anything.
        others = "" if ":" in surrogate else ", and all shipped surrogates have one gradient"
        yield Finding("info", f"each rollout serves one update: the ratio is 1{others}")
    if size.total == size.generations:
        yield Finding("warning", "a step has 1 prompt, so its gradient is mostly noise", "prompts_per_step: 16")


def golds(setup: Setup) -> Iterator[Finding]:
    """Check that each gold answer, as a completion in the template's format, is graded correct."""
    rows, answer_format = setup.problems.sample(GOLDS), setup.problems.template.answer_format
    damaged = [(row, f"read as {repaired(row['answer'])[:60]!r}") for row in rows if is_damaged(row["answer"])]
    as_plain = partial(plain, commas=decimal_commas([row["answer"] for row in rows]))
    wrong = not_correct(rows, repaired, answer_format)
    not_plain = [row for row in rows if as_plain(row["answer"]) != row["answer"]]
    bad_ids = {row["id"] for row, _ in (*wrong, *damaged)}
    by_text = [row for row in rows if row["id"] not in bad_ids and is_own_text(row["answer"], row["problem"])]
    rows_by_fault = {
        DAMAGED: damaged,
        "not correct when graded against themselves": wrong,
        OWN_TEXT: not_correct(not_plain, as_plain, answer_format),
        BY_TEXT: [(row, "only the same text is correct") for row in by_text],
    }
    for kind, bad in rows_by_fault.items():
        for row, example in bad[:1]:
            level, share = "warning", len(bad) / len(rows)
            if bad is wrong:
                level = "error" if share > BAD_SHARE else "info" if share <= FEW else "warning"
            message = f"{len(bad)} of {len(rows)} gold answers are {kind}"
            yield Finding(
                level,
                f"{message}; the first is {row['id']}, {row['answer'][:60]!r}: {example}",
                BARE if kind is OWN_TEXT else CORRECT,
            )


def examples(setup: Setup) -> Iterator[Finding]:
    """Count what the grader reads gold answers as, and show some, so that a wrong column is seen before the run."""
    sample = [row["answer"] for row in setup.problems.sample(GOLDS)]
    yield Finding("info", f"gold answers as the grader reads them: {in_words(readings(sample))}")


def not_correct(
    rows: Sequence[Mapping[str, Any]], rewritten: Callable[[str], str], answer_format: str
) -> list[tuple[Any, str]]:
    """Return the rows whose gold answer, ``rewritten`` as an answer, is not correct, each with the verdict in words."""
    answers = [rewritten(row["answer"]) for row in rows]
    results = verdicts([repaired(row["answer"]) for row in rows], answers, answer_format)
    return [
        (row, f"{answer[:60]!r} is {verdict}")
        for row, answer, verdict in zip(rows, answers, results, strict=True)
        if verdict is not Verdict.CORRECT
    ]


def verdicts(golds: Sequence[str], answers: Sequence[str], answer_format: str) -> list[Verdict]:
    """Return the verdict of each answer, written as a completion in the format, against its gold answer."""
    texts = [example_completion(answer, answer_format) for answer in answers]
    return [grade.verdict for grade in grade_batch(golds, texts, answer_format=answer_format)]


def rewards(setup: Setup) -> Iterator[Finding]:
    """Check that the reward functions run and give more for a correct completion than for a wrong one of its length."""
    s = setup.settings
    names, weights = s.rewards or [], s.reward_weights
    if not names or len(weights or names) != len(names):
        return  # settings() has reported the rewards
    negative = [name for name, one in SHIPPED.items() if one.can_be_negative]
    if s.scale_rewards == "mean" and ({*names} & {*negative} or min(weights or (0,)) < 0):
        reason = "can be negative, and scale_rewards='mean' (MaxRL) divides by their mean"
        raise ConfigError("rewards", names, reason, f"leave out {', '.join(negative)} and negative reward_weights")
    reward_functions(setup)
    rows = gradable(setup, PAIRS)
    if not rows:
        return  # golds() has reported the gold answers
    # The texts are all correct completions, then all wrong ones of equal length.
    answers, answer_format = [row["answer"] for row in rows], setup.problems.template.answer_format
    texts = [example_completion(answer, answer_format) for answer in (*answers, *map(other_answer, answers))]
    totals = [total or 0.0 for total in summed(setup, [*rows, *rows], texts)]
    right, wrong = totals[: len(rows)], totals[len(rows) :]
    named, example = ", ".join(names), f"such as {texts[0]!r} and {texts[len(rows)]!r}"
    if all(r < w - SURE for r, w in zip(right, wrong, strict=True)):
        remedy = "look at the sign of the rewards and of reward_weights"
        yield Finding("error", f"a wrong answer is rewarded more than a correct one by {named}, {example}", remedy)
    elif sum(right) - sum(wrong) <= SURE:
        message = f"the rewards ({named}) do not reward correct answers more than wrong ones, {example}"
        more = ", with the largest of reward_weights for accuracy" if weights or "accuracy" in names else ""
        yield Finding("warning", message, f"rewards: [{', '.join(dict.fromkeys(['accuracy', *names]))}]{more}")


def reward_functions(setup: Setup) -> list[tuple[Any, float]]:
    """Return the recipe's reward functions with their weights."""
    names, weights = setup.settings.rewards, setup.settings.reward_weights
    with renamed_error_fields({"reward_funcs": "rewards"}):
        return list(zip(map(load_reward, names), weights or [1.0] * len(names), strict=True))


def graded(setup: Setup, rows: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> list[Grade]:
    """Return the grades of completions, as in training."""
    answer_format = setup.problems.template.answer_format
    return grade_batch([row["answer"] for row in rows], texts, answer_format=answer_format)


def summed(setup: Setup, rows: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> list[float | None]:
    """Return the weighted sum of the rewards of each completion; None if no function returned a number."""
    grades = graded(setup, rows, texts)
    columns = [
        [reward and weight * reward for reward in _pay(function, setup, rows, texts, grades)]
        for function, weight in reward_functions(setup)
    ]
    # None: the function is not for this completion, and TRL leaves it out of the sum.
    values = [[value for value in values if value is not None] for values in zip(*columns, strict=True)]
    return [sum(one) if one else None for one in values]


def gradable(setup: Setup, most: int) -> list[Problem]:
    """Return at most ``most`` problems whose gold answer is graded correct, and another answer of its length wrong."""
    sample, answer_format = setup.problems.sample(4 * most), setup.problems.template.answer_format
    answers = [row["answer"] for row in sample]
    right = verdicts(answers, answers, answer_format)
    # The lengths are equal, so that a reward for length does not separate correct from wrong.
    wrong = verdicts(answers, list(map(other_answer, answers)), answer_format)
    usable = [pair == (Verdict.CORRECT, Verdict.WRONG) for pair in zip(right, wrong, strict=True)]
    return list(compress(sample, usable))[:most]


def other_answer(gold: str) -> str:
    """Return a wrong answer of the same length.

    >>> other_answer("79"), other_answer("1/3"), other_answer("(C)")
    ('81', '2/4', '000')
    """
    # No digit stays, and none becomes 0, so that the wrong answer is as long as the gold answer.
    return re.sub(r"\d", lambda digit: str(int(digit[0]) % 9 + 1), gold) if re.search(r"\d", gold) else "0" * len(gold)


def _pay(
    function: Any, setup: Setup, rows: Sequence[Mapping[str, Any]], texts: Sequence[str], grades: Sequence[Grade]
) -> list[Any]:
    """Return the function's reward of each completion. The function is called as in training."""
    s = setup.settings
    chat = not isinstance(rows[0]["prompt"], str)
    columns: dict[str, Any] = {
        **{key: [row[key] for row in rows] for key in rows[0] if key != "prompt"},
        "prompts": [row["prompt"] for row in rows],
        "completions": [[{"role": "assistant", "content": text}] for text in texts] if chat else texts,
        # Rewards on the length need tokens, and no tokenizer is loaded: bytes take their place.
        "completion_ids": [list(text.encode()) for text in texts],
        # TRL passes these three to every reward function.
        "trainer_state": SimpleNamespace(global_step=0, max_steps=s.max_steps, epoch=0.0),
        "log_extra": lambda *_: None,
        "log_metric": lambda *_: None,
    }
    added = {GRADE: grades, GRADE_TIMEOUT: s.grade_timeout, MAX_LENGTH: s.max_completion_length}
    # As in training, a reward may compare the completions of a problem. A problem that is sometimes solved has a right
    # completion, here as long as the first one.
    sizes = [(len(text.encode()), is_right(grade)) for text, grade in zip(texts, grades, strict=True)]
    added[GROUPS] = [
        group if any(right for _, right in group) else [*group, (group[0][0], 1.0)]
        for group in grouped([row["id"] for row in rows], sizes)
    ]
    try:
        called = guarded(function, added)(**columns)
        return start(called).result() if inspect.iscoroutine(called) else called
    except RewardError as error:
        remedy = ": training stops instead of assuming a reward of 0"  # of rewards/guard.py
        raise RewardError(str(error).replace(remedy, ": correct the function")) from None

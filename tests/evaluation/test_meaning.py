"""The lines of "What this number means", by hand: two problems with two samples, one right before and three after."""

import pytest

from grpo_math.evaluation.meaning import SEEDS, budget, meaning, memory, over_seeds
from grpo_math.run import metrics

RIGHT, WRONG = metrics.RIGHT[0], "wrong_answer"


def results(answers, tokens, in_format, cut):
    """``answers``: of p and q, those that begin with 1 are right."""
    rows = [
        {"id": name, "sample": i, "answer": answer, "category": RIGHT if answer[0] == "1" else WRONG}
        for name, given in zip("pq", answers, strict=True)
        for i, answer in enumerate(given)
    ]
    for row, n in zip(rows, tokens, strict=True):
        row.update(tokens=n, in_format=in_format)
    shared = {"samples": 2, "temperature": 0.5, "pass@k": {"1": 0, "2": 0}, "n": 2}
    return {**shared, "rows": rows, "categories": {"truncated": cut}}


BEFORE = results([["1", "2"], ["3", "3"]], [5, 15, 10, 10], in_format=False, cut=0)
AFTER = results([["1", "1"], ["4", "1"]], [25, 25, 20, 30], in_format=True, cut=1)


def test_the_votes_of_as_many_tokens_are_those_of_the_base():
    measured = budget(BEFORE, AFTER)
    equal = measured.pop("equal_tokens")
    assert (equal.pop("k"), equal.pop("base_tokens"), equal.pop("trained_tokens")) == (2, 20.0, 25.0)
    table = measured.pop("k")
    assert measured == {"samples": 2, "temperature": 0.5}
    # A tie wins half.
    expected = [(0.25, 0.75), (0.25, 0.75), (0.5, 1.0), (0.25, 0.75), (0.25, 0.75)]
    pairs = [table[k][name] for k in ("1", "2") for name in ("pass@k", "maj@k")]
    for pair, (base, trained) in zip([*pairs, equal], expected, strict=True):
        assert (pair["base"], pair["trained"], pair["difference"]) == (base, trained, trained - base)
    assert budget(AFTER, BEFORE)["equal_tokens"]["k"] == 1, "at least one sample"


@pytest.mark.parametrize(("low", "form"), [(-0.25, True), (0.0, True), (0.1, False)])
def test_an_interval_without_skill_is_form(low, form):
    compared = {"difference": 0.25, "ci95": [low, 0.5], "difference_in_format": 0.75}
    skill, *others = meaning(BEFORE, AFTER, compared, {"data": "/data/sums.jsonl", "memory": None})
    assert skill.text == (
        f"{'the run has learned the form, and no skill that shows: ' if form else ''}in the format +75.0 points: "
        f"+25.0 points [{100 * low:+.1f}, +50.0] from answers that were wrong in any form (skill), and +50.0 points "
        "from answers that were right in another form (form); 0.0% of all answers kept the format before and 100.0% "
        "after, and the length limit cut 0.0% and 25.0%"
    )
    assert (skill.title, skill.command) == ("Skill or form", "")
    assert [(line.title, line.text, line.command.rpartition(" ")[2]) for line in others] == [
        ("At as many tokens (sums.jsonl)", "not measured", "--probe"),
        ("Known by heart (sums.jsonl)", "not measured: the problems are too short", "--probe"),
        ("Other seeds", f"not measured; {SEEDS}", "RUN"),
    ]
    assert [line.title for line in meaning(None, {"data": "a/b"}, None, {"data": "a/b"})][1:3] == [
        "At as many tokens",
        "Known by heart",
    ]


def share(share, high):
    return {"n": 20, "accuracy": share, "ci95": [0.0, high], "rows": []}


def test_a_share_is_memory_if_it_is_above_a_twentieth_and_above_the_control():
    """The base knows one problem in ten, and some of what nobody can know; the trained model knows three in ten."""
    sides = {"base": share(0.1, 0.2), "trained": share(0.3, 0.5)}
    known = memory(sides, {"base": share(0.05, 0.1), "trained": share(0.0, 0.0)})
    assert known["finding"] == (
        "the trained model continues 30.0% of 20 problems word by word from their first 60%: it has read them, so that "
        "accuracy on them is partly memory"
    )
    assert known["problems"]["base"] == {"n": 20, "share": 0.1, "ci95": [0.0, 0.2]}
    few = {"base": share(0.05, 0.1), "trained": share(0.05, 0.1)}
    assert memory(few, {side: share(0.0, 0.0) for side in few})["finding"] is None
    lines = meaning(
        None, None, None, {"memory": known, "budget": budget(BEFORE, AFTER), "seeds": over_seeds([0.1, 0.1])}
    )
    assert [line.text for line in lines[1:]] == [
        "the trained model is right in 75.0% with 25 tokens a problem, the base's maj@2 in 25.0% with 20: "
        "+50.0 points [+50.0, +50.0]; pass@2 is 50.0% and 100.0%",
        "the base continues 10.0% of 20 problems word by word (95% interval 0.0% to 20.0%), the trained model 30.0%; "
        "of problems that nobody can know, the base continues 5.0%",
        "+10.0 points [+10.0, +10.0] over 2 seeds",
    ]

"""The lines of "What this number means", by hand: four times two problems with two samples, one right before and three
after."""

from dataclasses import replace

import pytest

from grpo_math.evaluation.evaluation import Evaluation
from grpo_math.evaluation.meaning import SEEDS, meaning
from grpo_math.evaluation.paired import Comparison
from grpo_math.evaluation.probe_results import Probe, budget, memory, over_seeds, read_probe
from grpo_math.evaluation.stats import PairedDifference
from grpo_math.evaluation.summary import Record, Share, Summary, summarize
from grpo_math.run import metrics
from grpo_math.run.files import write_json

RIGHT, WRONG = metrics.RIGHT[0], "wrong_answer"


def evaluation(answers, tokens, in_format, cut):
    """``answers``: of two problems, those that begin with 1 are right. ``cut``: completions that the limit has cut."""
    eight = zip("abcdefgh", answers * 4, strict=True)
    given = [(name, i, answer) for name, some in eight for i, answer in enumerate(some)]
    records = [
        Record(
            name,
            i,
            answer=answer,
            category=RIGHT if answer[0] == "1" else WRONG,
            tokens=n,
            in_format=in_format,
            truncated=number < 4 * cut,
        )
        for number, ((name, i, answer), n) in enumerate(zip(given, tokens * 4, strict=True))
    ]
    return Evaluation({"samples": 2, "temperature": 0.5, "data": "a/b"}, summarize(records, 2), records)


BEFORE = evaluation([["1", "2"], ["3", "3"]], [5, 15, 10, 10], in_format=False, cut=0)
AFTER = evaluation([["1", "1"], ["4", "1"]], [25, 25, 20, 30], in_format=True, cut=1)


def test_the_votes_of_as_many_tokens_are_those_of_the_base():
    measured = budget(BEFORE, AFTER)
    equal = measured.equal_tokens
    assert (equal.k, equal.base_tokens, equal.trained_tokens) == (2, 20.0, 25.0)
    assert (measured.samples, measured.temperature) == (2, 0.5)
    # A tie wins half.
    expected = [(0.25, 0.75), (0.25, 0.75), (0.5, 1.0), (0.25, 0.75), (0.25, 0.75)]
    pairs = [table[k] for k in (1, 2) for table in (measured.pass_at_k, measured.maj_at_k)]
    for pair, (base, trained) in zip([*pairs, equal], expected, strict=True):
        assert (pair.base, pair.trained, pair.difference) == (base, trained, trained - base)
    assert budget(AFTER, BEFORE).equal_tokens.k == 1, "at least one sample"


@pytest.mark.parametrize(("low", "form"), [(-0.25, True), (0.0, True), (0.1, False)])
def test_an_interval_without_skill_is_form(low, form):
    skill, in_format = PairedDifference(0.25, low, 0.5, 2, 1, 0), PairedDifference(0.75, 0.5, 1.0, 2, 1, 0)
    short = Probe("/data/sums.jsonl", None, budget(BEFORE, AFTER), memory=None)
    skill, _, *others = meaning("a/b", Comparison(BEFORE, AFTER, skill, in_format, [], []), short)
    assert skill.text == (
        f"{'the run has learned the form, and no skill that shows: ' if form else ''}in the format +75.0 points: "
        f"+25.0 points [{100 * low:+.1f}, +50.0] from answers that were wrong in any form (skill), and +50.0 points "
        "from answers that were right in another form (form); 0.0% of all answers kept the format before and 100.0% "
        "after, and the length limit cut 0.0% and 25.0%"
    )
    assert (skill.title, skill.command) == ("Skill or form", "")
    assert [(line.title, line.text, line.command.rpartition(" ")[2]) for line in others] == [
        ("Known by heart (sums.jsonl)", "not measured: the problems are too short", ""),
        ("Other seeds", f"not measured; {SEEDS}", "RUN"),
    ]
    assert [line.title for line in meaning("/data/sums.jsonl", None, short)][1:3] == [
        "Same token budget",
        "Known by heart",
    ]
    assert [line.text for line in meaning("a/b", None)][:3] == ["not measured"] * 3


def evaluated(value, high):
    summary = Summary(Share(value, [0.0, high], 20), 0.0, {}, {}, {}, {})
    return Evaluation({"samples": 1}, summary, [])


def test_a_share_is_memory_if_it_is_above_a_twentieth_and_above_the_control(tmp_path):
    """The base knows one problem in ten, and some of what nobody can know; the trained model knows three in ten."""
    sides = {"base": evaluated(0.1, 0.2), "trained": evaluated(0.3, 0.5)}
    known = memory(sides, {"base": evaluated(0.05, 0.1), "trained": evaluated(0.0, 0.0)})
    assert known.finding.message == (
        "the trained model continues 30.0% of 20 problems word by word from their first 60%: it has read them, so that "
        "accuracy on them is partly memory"
    )
    assert known.problems["base"] == (0.1, [0.0, 0.2], 20)
    few = {"base": evaluated(0.05, 0.1), "trained": evaluated(0.05, 0.1)}
    assert memory(few, {side: evaluated(0.0, 0.0) for side in few}).finding is None
    probe = Probe("a/b", "abc", budget(BEFORE, AFTER), known)
    lines = meaning("a/b", None, probe, over_seeds([0.1, 0.1]))
    assert [line.text for line in lines[1:]] == [
        "the trained model is right in 75.0% with 25 tokens a problem, the base's maj@2 in 25.0% with 20: "
        "+50.0 points [-5.4, +68.5]; pass@2 is 50.0% and 100.0%",
        "the base continues 10.0% of 20 problems word by word (95% interval 0.0% to 20.0%), the trained model 30.0%; "
        "of problems that nobody can know, the base continues 5.0%",
        "+10.0 points [+10.0, +10.0] over 2 seeds",
    ]
    for one in (probe, replace(probe, memory=None)):
        write_json(tmp_path / "probe.json", one.to_dict())
        assert read_probe(tmp_path / "probe.json") == one

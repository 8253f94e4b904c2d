"""Two results files: what is refused, and all figures of a comparison by hand."""

import json
import re
from dataclasses import replace

import pytest

from grpo_math.cli import main
from grpo_math.errors import UserError
from grpo_math.evaluation.evaluation import Evaluation, ResultsError, read, write
from grpo_math.evaluation.paired import compare
from grpo_math.evaluation.stats import paired_bootstrap
from grpo_math.evaluation.summary import Record, summarize
from grpo_math.evaluation.tables import comparison_table, moved, skill_or_form
from grpo_math.grading import GRADER


def evaluation(*right: str, **changes) -> Evaluation:
    """Problem i has a completion for each letter of ``right[i]``: right, right in another format, or wrong."""
    names = {"y": "correct", "f": "correct_answer_bad_format", "n": "wrong_answer"}
    records = [
        Record(
            f"p{i}",
            sample,
            problem=f"What is {i} + 1?",
            gold=str(i + 1),
            completion=f"#### {0 if letter == 'n' else i + 1}",
            category=names[letter],
        )
        for i, letters in enumerate(right)
        for sample, letter in enumerate(letters)
    ]
    settings = {
        "grader": GRADER,
        "model": "m",
        "adapter": None,
        "backend": "vllm",
        "answer_format": "gsm8k",
        "prompt_hash": "ab",
        "samples": len(right[0]),
        "temperature": 0.0,
        "max_new_tokens": 8,
    }
    return Evaluation(settings | changes, summarize(records, len(right[0])), records)


def with_second(**changes) -> Evaluation:
    """An evaluation whose second record is another."""
    both = evaluation("y", "y")
    return replace(both, records=[both.records[0], replace(both.records[1], **changes)])


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (evaluation("y", "y", answer_format="another"), "answer_format differs (before 'gsm8k', after 'another'): "),
        (evaluation("y", "y", backend="hf"), "backend differs (before 'vllm', after 'hf'): "),
        (evaluation("y", "y", prompt_hash="cd"), "prompt_hash differs (before 'ab', after 'cd'): "),
        (evaluation("y", "y", grader=7), f"grader differs (before {GRADER}, after 7): "),
        (evaluation("yy", "yy"), "samples differs (before 1, after 2): "),
        (evaluation("y", "y", temperature=7), "temperature differs (before 0.0, after 7): "),
        (evaluation("y", "y", max_new_tokens=7), "max_new_tokens differs (before 8, after 7): "),
        (evaluation("y", "y", request={"top_k": 7, "new": 1}), "request.top_k differs (before 0, after 7): "),
        (evaluation("n", "y", "y"), "the problems differ (before 2, after 3, in one only 1, such as 'p2')"),
        (with_second(problem="another"), "the problems differ (before 2, after 2, in one only 2, such as 'p1')"),
        (with_second(gold="another"), "the problems differ (before 2, after 2, in one only 2, such as 'p1')"),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_each_difference_that_is_no_training_is_refused_by_name(after, words):
    with pytest.raises(ResultsError, match=f"^{re.escape(words)}"):
        compare(evaluation("n", "y", request={"top_k": 0, "old": 1}), after)
    compare(evaluation("n", "y"), evaluation("y", "y", request={"top_k": 7}))  # an older file has no request


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", " cannot be read (JSONDecodeError: "),
        ("[]", ": is not a results file of format 1"),
        ('{"format": 1, "rows": []}', ": is not a results file of format 1"),
        ('{"format": 2, "rows": [1]}', ": is not a results file of format 1"),
        ('{"format": 1, "rows": [{"id": 1}]}', " cannot be read (KeyError: 'samples'"),
    ],
)
def test_a_file_that_holds_no_results_is_named(content, words, tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text(content)
    with pytest.raises(UserError, match=re.escape(f"{bad}{words}")):
        read(bad)


def test_all_figures_of_a_comparison_by_hand(tmp_path, capsys):
    before, after = evaluation(*"nnnnnyyn"), evaluation(*"fyyyynyn", adapter="a")
    comparison = compare(before, after)
    answer = comparison.to_dict()
    right, in_format = (paired_bootstrap([0] * 5 + [1, 1, 0], [new, 1, 1, 1, 1, 0, 1, 0]) for new in (1, 0))
    assert answer.pop("before") == {
        "model": "m",
        "adapter": None,
        "accuracy": 0.25,
        "ci95": before.summary.accuracy.ci95,
        "accuracy_in_format": 0.25,
        "categories": before.summary.categories,
    }
    assert answer.pop("after") == {
        "model": "m",
        "adapter": "a",
        "accuracy": 0.75,
        "ci95": after.summary.accuracy.ci95,
        "accuracy_in_format": 5 / 8,
        "categories": after.summary.categories,
    }
    up = [("p0", "1"), ("p1", "2"), ("p2", "3")]
    assert answer == {
        "n": 8,
        "gained": 5,
        "lost": 1,
        "test": "mcnemar",
        "p": 14 / 64,  # 2 (1 + 6) / 2^6
        "difference": 0.5,
        "ci95": [right.lo, right.hi],
        "difference_in_format": 3 / 8,
        "ci95_in_format": [in_format.lo, in_format.hi],
        "improvements": [
            {"id": id, "problem": f"What is {i} + 1?", "gold": gold, "before": "#### 0", "after": f"#### {gold}"}
            for i, (id, gold) in enumerate(up)
        ],
        "regressions": [{"id": "p5", "problem": "What is 5 + 1?", "gold": "6", "before": "#### 6", "after": "#### 0"}],
    }
    assert len(comparison.improvements) == 5
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, one in zip(paths, (before, after), strict=True):
        write(one, path)
    assert read(paths[1]) == replace(after, path=str(paths[1]))
    assert main(["evaluate", "--json", "--compare", *map(str, paths)]) == 0
    assert json.loads(capsys.readouterr().out) == comparison.to_dict()
    assert main(["evaluate", "--compare", *map(str, paths)]) == 0
    assert capsys.readouterr().out == comparison_table(comparison) + "\n"


def test_several_samples_are_paired_by_problem():
    comparison = compare(evaluation("yn", "yy", "nn"), evaluation("yy", "fn", "ny"))
    accuracy = comparison.accuracy
    assert (accuracy.n, accuracy.gained, accuracy.lost, comparison.test) == (3, 2, 1, "sign")
    assert moved(comparison) == "3 problems: 2 are correct more often, 1 less often (sign test: p = 1)"
    assert accuracy.difference == pytest.approx((0.5 - 0.5 + 0.5) / 3)
    assert comparison.in_format.difference == pytest.approx((0.5 - 1 + 0.5) / 3)
    [first, _], [lost] = comparison.improvements, comparison.regressions
    assert (first.id, first.before, first.after) == ("p0", "#### 0", "#### 1"), "a wrong one, a right one"
    assert (lost.id, lost.before, lost.after) == ("p1", "#### 2", "#### 0")


@pytest.mark.parametrize(("after", "form"), [(("y", "y", "y", "y") * 5, False), (("y", "n", "n", "n") * 5, True)])
def test_a_difference_in_format_is_skill_or_form(after, form):
    """Twenty problems, five of them right in another format at first."""

    def kept(evaluation, in_format):
        """As many answers are in the format as ``in_format`` says, and every other one is cut."""
        records = [
            replace(record, in_format=in_format, truncated=in_format and number % 2 == 0)
            for number, record in enumerate(evaluation.records)
        ]
        return replace(evaluation, records=records)

    before, after = kept(evaluation(*("f", "n", "n", "n") * 5), False), kept(evaluation(*after), True)
    (sentence,) = skill_or_form(compare(before, after))
    learned = "the run has learned the form, and no skill that shows: "
    assert sentence.startswith(learned) == form
    points = "+25.0 points: +0.0 points [" if form else "+100.0 points: +75.0 points ["
    assert sentence.removeprefix(learned).startswith(f"in the format {points}")
    assert sentence.partition("(skill), and ")[2] == (
        "+25.0 points from answers that were right in another form (form); 0.0% of all answers kept the format before "
        "and 100.0% after, and the length limit cut 0.0% and 50.0%"
    )
    assert skill_or_form(compare(before, replace(after, first_prompt="1 + 1?"))) == []

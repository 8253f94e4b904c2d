"""Two results files: what is refused, the figures by hand, several samples, and the table on real outputs."""

from __future__ import annotations

import json
import re

import pytest

from grpo_math.cli import main
from grpo_math.evaluation.compare import ResultsError, changed, compare, comparison, read_results
from grpo_math.grading import GRADER
from grpo_math.report.terminal import terminal_table


def results(*right: list[bool], **changes) -> dict:
    """Problem i has the completions ``right[i]``."""
    rows = [
        {
            "id": f"p{i}",
            "sample": sample,
            "problem": f"What is {i} + 1?",
            "gold": str(i + 1),
            "completion": f"#### {i + 1 if flag else 0}",
            "category": "correct" if flag else "wrong_answer",
        }
        for i, flags in enumerate(right)
        for sample, flag in enumerate(flags)
    ]
    settings = {"template": "gsm8k", "prompt_hash": "ab", "grader": GRADER, "max_new_tokens": 8}
    return {"format": 1, **settings, "samples": len(right[0]), "temperature": 0.0, "rows": rows} | changes


def one(*right: int) -> dict:
    return results(*([bool(flag)] for flag in right))


def write(path, content: dict):
    path.write_text(json.dumps(content))
    return str(path)


def with_second(**changes) -> dict:
    """Results whose second row is another."""
    changed_results = one(1, 1)
    changed_results["rows"][1] |= changes
    return changed_results


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (one(1, 1) | {"template": "another"}, "template differs (before 'gsm8k', after 'another'): "),
        (one(1, 1) | {"prompt_hash": "cd"}, "prompt_hash differs (before 'ab', after 'cd'): "),
        (one(1, 1) | {"grader": 7}, f"grader differs (before {GRADER}, after 7): "),
        (one(1, 1) | {"samples": 7}, "samples differs (before 1, after 7): "),
        (one(1, 1) | {"temperature": 7}, "temperature differs (before 0.0, after 7): "),
        (one(1, 1) | {"max_new_tokens": 7}, "max_new_tokens differs (before 8, after 7): "),
        (one(1, 1) | {"tools": {"names": ["python"]}}, "tools differs (before None, after {'names': ['python']}): "),
        (one(0, 1, 1), "the problems differ (before 2, after 3, in one only 1, such as 'p2')"),
        (with_second(problem="another"), "problem of 'p1' differs: evaluate both on the same data"),
        (with_second(gold="another"), "gold of 'p1' differs: evaluate both on the same data"),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_each_difference_that_is_no_training_is_refused_by_name(after, words):
    for function in (compare, changed, comparison):
        with pytest.raises(ResultsError, match=f"^{re.escape(words)}") as refused:
            function(one(0, 1), after)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", " cannot be read (JSONDecodeError: "),
        ('{"format": 1, "rows": [{"id', " cannot be read (JSONDecodeError: "),
        ('{"format": 1, "rows": []}', ": is not a results file of format 1"),
        ('{"format": 2}', ": is not a results file of format 1"),
    ],
)
def test_a_file_that_holds_no_results_is_one_line(content, words, tmp_path, capsys):
    bad = tmp_path / "bad.json"
    bad.write_bytes(content if isinstance(content, bytes) else content.encode())
    good = write(tmp_path / "good.json", one(1, 0))
    assert main(["evaluate", "--compare", good, str(bad)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"error: {bad}{words}")
    assert main(["evaluate", "--compare", good, str(tmp_path / "nowhere.json")]) == 2
    assert "cannot be read (No such file or directory)" in capsys.readouterr().err


def test_the_figures_of_a_comparison_by_hand():
    answer = comparison(one(0, 0, 0, 0, 0, 1, 1, 0), one(1, 1, 1, 1, 1, 0, 1, 0))
    assert (answer["n"], answer["gained"], answer["lost"]) == (8, 5, 1)
    assert answer["difference"] == 0.5
    assert (answer["test"], answer["p"]) == ("mcnemar", 14 / 64)  # 2 (1 + 6) / 2^6
    lo, hi = answer["ci95"]
    assert lo < 0.5 < hi
    assert (answer["before"]["accuracy"], answer["after"]["accuracy"]) == (0.25, 0.75)
    assert answer["after"]["categories"]["correct"] == 6
    assert [change["id"] for change in answer["improvements"]] == ["p0", "p1", "p2"]
    assert answer["regressions"] == [
        {"id": "p5", "problem": "What is 5 + 1?", "gold": "6", "before": "#### 6", "after": "#### 0"}
    ]


def test_several_samples_are_paired_by_problem():
    before = results([True, False], [True, True], [False, False])
    after = results([True, True], [True, False], [False, True])
    answer = comparison(before, after)
    assert (answer["n"], answer["gained"], answer["lost"], answer["test"]) == (3, 2, 1, "sign")
    assert answer["difference"] == pytest.approx((0.5 - 0.5 + 0.5) / 3)
    (change, _) = changed(before, after)
    assert (change.id, change.before, change.after) == ("p0", "#### 0", "#### 1"), "a wrong one, then a right one"
    (lost,) = changed(before, after, lost=True)
    assert (lost.before, lost.after) == ("#### 2", "#### 0")
    assert "3 problems: 2 are correct more often, 1 less often (sign test: p = 1)" in terminal_table(answer)


def test_the_command_prints_the_table_or_all_of_it_as_json(tmp_path, capsys):
    files = [write(tmp_path / "b.json", one(0, 0, 1, 1)), write(tmp_path / "a.json", one(1, 1, 0, 1))]
    assert main(["evaluate", "--compare", *files]) == 0
    out = capsys.readouterr().out
    assert "accuracy" in out
    assert "McNemar, exact: p = 1)" in out
    assert main(["evaluate", "--json", "--compare", *files]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == comparison(*map(read_results, files))

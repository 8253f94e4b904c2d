"""Two results files: what is refused, and all figures of a comparison by hand."""

import json
import re

import pytest

from grpo_math.cli import main
from grpo_math.errors import UserError
from grpo_math.evaluation.paired import ResultsError, changed, compare, comparison, moved, read_results, terminal_table
from grpo_math.evaluation.stats import paired_bootstrap
from grpo_math.evaluation.summary import summary
from grpo_math.grading import GRADER


def results(*right: str, **changes) -> dict:
    """Problem i has a completion for each letter of ``right[i]``: right, right in another format, or wrong."""
    names = {"y": "correct", "f": "correct_answer_bad_format", "n": "wrong_answer"}
    rows = [
        {
            "id": f"p{i}",
            "sample": sample,
            "problem": f"What is {i} + 1?",
            "gold": str(i + 1),
            "completion": f"#### {0 if letter == 'n' else i + 1}",
            "category": names[letter],
        }
        for i, letters in enumerate(right)
        for sample, letter in enumerate(letters)
    ]
    return {
        "format": 1,
        "grader": GRADER,
        "model": "m",
        "backend": "vllm",
        "answer_format": "gsm8k",
        "prompt_hash": "ab",
        "samples": len(right[0]),
        "temperature": 0.0,
        "max_new_tokens": 8,
        **summary(rows, len(right[0])),
        "rows": rows,
        **changes,
    }


def with_second(**changes) -> dict:
    """Results whose second row is another."""
    changed_results = results("y", "y")
    changed_results["rows"][1] |= changes
    return changed_results


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (results("y", "y", answer_format="another"), "answer_format differs (before 'gsm8k', after 'another'): "),
        (results("y", "y", backend="hf"), "backend differs (before 'vllm', after 'hf'): "),
        (results("y", "y", prompt_hash="cd"), "prompt_hash differs (before 'ab', after 'cd'): "),
        (results("y", "y", grader=7), f"grader differs (before {GRADER}, after 7): "),
        (results("yy", "yy"), "samples differs (before 1, after 2): "),
        (results("y", "y", temperature=7), "temperature differs (before 0.0, after 7): "),
        (results("y", "y", max_new_tokens=7), "max_new_tokens differs (before 8, after 7): "),
        (results("y", "y", tools={"names": ["f"]}), "tools differs (before None, after {'names': ['f']}): "),
        (results("y", "y", request={"top_k": 7, "new": 1}), "request.top_k differs (before 0, after 7): "),
        (results("n", "y", "y"), "the problems differ (before 2, after 3, in one only 1, such as 'p2')"),
        (with_second(problem="another"), "the problems differ (before 2, after 2, in one only 2, such as 'p1')"),
        (with_second(gold="another"), "the problems differ (before 2, after 2, in one only 2, such as 'p1')"),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_each_difference_that_is_no_training_is_refused_by_name(after, words):
    for function in (compare, changed, comparison):
        with pytest.raises(ResultsError, match=f"^{re.escape(words)}"):
            function(results("n", "y", request={"top_k": 0, "old": 1}), after)
    compare(results("n", "y"), results("y", "y", request={"top_k": 7}))  # an older file has no request


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", " cannot be read (JSONDecodeError: "),
        ("[]", ": is not a results file of format 1"),
        ('{"format": 1, "rows": []}', ": is not a results file of format 1"),
        ('{"format": 2, "rows": [1]}', ": is not a results file of format 1"),
    ],
)
def test_a_file_that_holds_no_results_is_named(content, words, tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text(content)
    with pytest.raises(UserError, match=re.escape(f"{bad}{words}")):
        read_results(bad)


def test_all_figures_of_a_comparison_by_hand(tmp_path, capsys):
    before, after = results(*"nnnnnyyn"), results(*"fyyyynyn", adapter="a")
    answer = comparison(before, after)
    right, in_format = (paired_bootstrap([0] * 5 + [1, 1, 0], [new, 1, 1, 1, 1, 0, 1, 0]) for new in (1, 0))
    assert answer.pop("before") == {
        "model": "m",
        "adapter": None,
        "accuracy": 0.25,
        "ci95": before["ci95"],
        "accuracy_in_format": 0.25,
        "categories": before["categories"],
    }
    assert answer.pop("after") == {
        "model": "m",
        "adapter": "a",
        "accuracy": 0.75,
        "ci95": after["ci95"],
        "accuracy_in_format": 5 / 8,
        "categories": after["categories"],
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
    assert len(comparison(before, after, examples=None)["improvements"]) == 5
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, content in zip(paths, (before, after), strict=True):
        path.write_text(json.dumps(content))
    assert read_results(paths[1]) == {**after, "results": str(paths[1])}
    assert main(["evaluate", "--json", "--compare", *map(str, paths)]) == 0
    assert json.loads(capsys.readouterr().out) == comparison(before, after)
    assert main(["evaluate", "--compare", *map(str, paths)]) == 0
    assert capsys.readouterr().out == terminal_table(comparison(before, after)) + "\n"


def test_several_samples_are_paired_by_problem():
    before, after = results("yn", "yy", "nn"), results("yy", "fn", "ny")
    answer = comparison(before, after)
    assert (answer["n"], answer["gained"], answer["lost"], answer["test"]) == (3, 2, 1, "sign")
    assert moved(answer) == "3 problems: 2 are correct more often, 1 less often (sign test: p = 1)"
    assert answer["difference"] == pytest.approx((0.5 - 0.5 + 0.5) / 3)
    assert answer["difference_in_format"] == pytest.approx((0.5 - 1 + 0.5) / 3)
    [first, _], [lost] = answer["improvements"], answer["regressions"]
    assert [first[name] for name in ("id", "before", "after")] == ["p0", "#### 0", "#### 1"], "a wrong one, a right one"
    assert [lost[name] for name in ("id", "before", "after")] == ["p1", "#### 2", "#### 0"]

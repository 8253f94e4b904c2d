"""A JSONL file of answers -> the object that `grpo-math grade --json` prints."""

import json

import pytest

from grpo_math.errors import DataError
from grpo_math.grading.file import grade_file


def write(tmp_path, *lines):
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_results_keep_the_row_order_and_verdicts_are_counted(tmp_path):
    rows = [{"gold": "7", "prediction": p} for p in ("#### 7", "#### 8", "")] + [{"gold": "", "prediction": "7"}]
    rows += [{"gold": 7, "prediction": None}]
    results = json.loads(json.dumps(grade_file(write(tmp_path, *rows))))
    assert [(r["verdict"], r["answer"]) for r in results["results"]] == [
        *(("correct", "7"), ("wrong", "8"), ("no_answer", None), ("bad_gold", None), ("no_answer", None))
    ]
    counts = {"correct": 1, "wrong": 1, "no_answer": 2, "unparseable": 0, "uncheckable": 0, "bad_gold": 1, "crash": 0}
    assert (results["rows"], results["verdicts"]) == (5, counts)
    assert all(0 <= r["seconds"] < 10 for r in results["results"])


def test_a_row_can_name_its_own_format(tmp_path):
    both = "<answer>1</answer>\n#### 2"
    rows = [{"gold": "1", "prediction": both, "format": "xml"}, {"gold": "1", "prediction": both}]
    results = grade_file(write(tmp_path, *rows), answer_format="gsm8k")
    assert [r["verdict"] for r in results["results"]] == ["correct", "wrong"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"gold": "1"}', ":2: prediction is missing"),
        ('{"prediction": "1"}', ":2: gold is missing"),
        ("not json", ":2: row cannot be read"),
        ("[1]", ":2: gold is missing"),
        ('{"gold": "1", "prediction": "1", "format": "latex"}', ":2: format is 'latex'"),
    ],
)
def test_a_bad_row_is_named_with_its_line_and_field(tmp_path, line, message):
    with pytest.raises(DataError, match="answers.jsonl" + message):
        grade_file(write(tmp_path, {"gold": "1", "prediction": "1"}, line))

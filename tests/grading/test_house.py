"""What a grader may decide either way: each rule of the house with its default, in this process and in a worker."""

import json
import subprocess
import sys

import pytest

from grpo_math.errors import ConfigError
from grpo_math.grading import House, grade, grade_batch

CASES = [
    ("25", r"\boxed{25\%}", House(), "correct"),
    ("25", r"\boxed{25\%}", House(percent_as_number=False), "wrong"),
    ("0.25", r"\boxed{25\%}", House(percent_as_number=False), "correct"),
    (r"\frac{1}{3}", "0.333333333333", House(), "correct"),
    (r"\frac{1}{3}", "0.33333333333", House(), "wrong"),
    (r"\frac{1}{3}", "0.333333", House(digits=6), "correct"),
    (r"\sqrt{2}", "1.41421", House(digits=6), "correct"),
    (r"\sqrt{2}", "1.41421356237309", House(digits=0), "wrong"),
    ("42", r"First \boxed{3}, then \boxed{42}", House(), "correct"),
    ("42", r"First \boxed{3}, then \boxed{42}", House(last_box=False), "no_answer"),
    ("42", r"First \boxed{42}, and so \boxed{42}", House(last_box=False), "correct"),
]


@pytest.mark.parametrize(("gold", "text", "house", "verdict"), CASES)
def test_a_rule_of_the_house_decides(gold, text, house, verdict):
    assert str(grade(gold, text, house=house)) == verdict


def test_digits_that_would_pay_a_near_answer_are_refused():
    with pytest.raises(ConfigError, match="digits=3 would pay answers that are only near: give 0, or 6 or more"):
        grade_batch(["1"], ["1"], house=House(digits=3))


def test_the_command_takes_them(tmp_path):
    rows = [{"gold": "25", "prediction": "25%"}, {"gold": "1/3", "prediction": "0.333333"}]
    rows.append({"gold": "42", "prediction": r"First \boxed{3}, then \boxed{42}"})
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def verdicts(*options):
        command = [sys.executable, "-m", "grpo_math.cli", "grade", str(file), "--json", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return [result["verdict"] for result in json.loads(done.stdout)["results"]]

    assert verdicts() == ["correct", "wrong", "correct"]
    assert verdicts("--no_percent_as_number", "--digits", "6", "--no_last_box") == ["wrong", "correct", "no_answer"]

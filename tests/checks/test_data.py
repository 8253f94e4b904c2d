"""What doctor finds in the data."""

from __future__ import annotations

import json

from grpo_math.checks.preflight import preflight
from grpo_math.checks.setup import Setup
from grpo_math.settings.recipe import read


def test_contradictory_gold_answers_of_one_problem_are_a_warning(tmp_path):
    file = tmp_path / "mine.jsonl"
    golds = [
        ("What is half of 1?", "1/2"),
        ("What is half of 1?", "0.5"),
        ("3 + 4?", "7"),
        ("3 + 4?", "8"),
        ("2?", "2"),
    ]
    file.write_text("".join(json.dumps({"problem": problem, "answer": gold}) + "\n" for problem, gold in golds))

    def warnings(*words: str) -> list[str]:
        asked = read(["--dataset", str(file), "--eval_n", "0", *words])
        findings = preflight(Setup(asked.values, asked.given), only=("problems",))
        return [finding.message for finding in findings if finding.level == "warning"]

    assert warnings() == ["1 problem has different gold answers: mine/3 has '7', mine/4 has '8'"]
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:3]))
    assert warnings() == []

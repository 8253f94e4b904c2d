"""A problem's completions on the page: what each was paid, and why a right number got nothing."""

from __future__ import annotations

from pathlib import Path

from grpo_math.report.groups import groups, why
from grpo_math.report.run_dir import Run
from grpo_math.report.viewer import sources

ROW = {"step": 4, "problem_id": "sum-1", "gold": "17", "prompt": "What is 9 + 8?", "answer_length": 0.5}


def row(text, verdict, reward, **more):
    own = {"completion": text, "verdict": verdict, "reward": reward, "gsm8k": reward - 0.5, "advantage": 0.0}
    return {**ROW, **own, "in_format": "####" in text, "tokens": len(text), "truncated": False, **more}


TABLE = [
    row("9 + 8 = 17\n#### 17", "correct", 1.5, extracted="17"),
    row("It is 17.", "correct", 0.5, extracted="17"),
    row("9 + 8 = 17\n#### 18", "wrong", 0.5, extracted="18"),
    row("17 apples and more and", "no_answer", 0.5, extracted=None, truncated=True),
    row("#### 117", "wrong", 0.5, extracted="117"),
    row("#### 0", "crash", 0.5, extracted="0"),
]


def source(table, template="gsm8k"):
    run = Run(Path("run"), config={"prompt_template": template}, completions=table)
    return sources(run, comparable=False)[0]


def test_a_group_is_a_row_that_says_what_came_of_it():
    [shown] = source(TABLE).rows
    assert shown.title == "step 4, problem sum-1, gold 17: 2 of 6 right, rewards 0.5 to 1.5"
    assert [side.badge for side in shown.sides][:4] == ["correct", "correct", "wrong", "no_answer"]
    assert shown.sides[1].facts == (
        "answer 17, not in the format, answer_length 0.5, gsm8k 0, reward 0.5, advantage 0, 9 tokens"
    )


def test_a_completion_says_why_a_right_number_was_not_paid():
    [shown] = source(TABLE).rows
    assert [side.note for side in shown.sides] == [
        "",
        "right, but outside the gsm8k format; it was paid 0.5",
        "the text holds the gold answer 17, but the answer that was read is 18",
        "cut at the length limit before it was done; the text holds 17",
        "",  # 117 is not 17
        "not graded (crash), so that it is left out of its group",
    ]
    assert why({"verdict": "correct", "in_format": True, "reward": 0.0}, "#### 17") != ""
    assert why({"verdict": "wrong", "answer": "3", "gold": "(x.*"}, "(x.* 3") != "", "a gold is no pattern"


def test_groups_are_filtered_by_what_they_hold_and_sorted_by_spread():
    equal = [{**one, "step": 5, "reward": 0.0} for one in TABLE[:2]]
    found = source([*TABLE, *equal])
    assert list(found.filters) == ["step", "verdict", "holds"]
    assert "equal rewards alone" in found.filters["holds"]
    assert "spread of rewards" in found.sorts
    assert [one.keys["spread of rewards"] > 0 for one in found.rows] == [True, False]
    assert found.rows[1].title.endswith("2 of 2 right, every reward 0: moves no weight")


def test_a_table_of_trl_alone_has_its_groups_too():
    table = [{"step": 1, "prompt": p, "completion": "x", "length": r, "advantage": r} for p in "ab" for r in (0.0, 1.0)]
    assert [(group.spread, group.mean) for group in groups(table)] == [(0.5, 0.5), (0.5, 0.5)]
    assert [one.title for one in source(table).rows] == ["step 1: rewards 0 to 1"] * 2
    assert not any(side.note for one in source(table).rows for side in one.sides)

"""A synthetic run directory: 256 problems before and after, completions; and a hostile one."""

import json
import math
import random
import re
from html import unescape

import pyarrow
import pytest
from pyarrow.parquet import write_table

from grpo_math.evaluation.evaluation import Evaluation
from grpo_math.evaluation.summary import Record, summarize
from grpo_math.grading import GRADER
from grpo_math.report import page

SVGS = {}

OWNED = "document.title='owned'"
HOSTILE = f'</script><script>{OWNED}</script><img src=x onerror="{OWNED}"><!--\u2028&amp;\'"@@data@@ \\boxed{{1}}'


def evaluation(right, n=256, seed=0, **settings):
    """An evaluation in which the problems of ``right`` are correct, a twelfth of them outside the format."""
    rng = random.Random(seed)
    records = []
    for i in range(n):
        a, b = 1 + i % 19, 2 + (i * 7) % 17
        wrong = rng.choice(["bad_format", "wrong_answer", "wrong_answer", "bad_format", "truncated"])
        category = wrong if i not in right else "correct_answer_bad_format" if i % 12 == 5 else "correct"
        answer = a + b if category.startswith("correct") else a + b + rng.randint(1, 5)
        marker = "" if category.endswith("bad_format") else f"\n#### {answer}"
        records.append(
            Record(
                id=f"sums-{i}",
                problem=f"What is {a} + {b}?",
                gold=str(a + b),
                completion="I think that " * 4 if category == "truncated" else f"{a} + {b} = {answer}{marker}",
                verdict="correct" if category.startswith("correct") else "wrong",
                answer=str(answer),
                in_format=bool(marker),
                category=category,
                tokens=rng.randint(8, 14),
                truncated=category == "truncated",
            )
        )
    asked = {
        "grader": GRADER,
        "model": "SmolLM2-135M-Instruct",
        "adapter": None,
        "data": "embedded:level=1",
        "seed": 0,
        "answer_format": "gsm8k",
        "samples": 1,
        "temperature": 0.0,
    }
    versions = {"trl": "1.16.0", "torch": "2.9.0"}
    return Evaluation(asked | settings, summarize(records), records, seconds=12.5, versions=versions)


def results(right, n=256, seed=0, **changes):
    """The results file of an `evaluation`."""
    return evaluation(right, n, seed).to_dict() | changes


def write_completions(run, steps, rows=32, conversational=True, text="3 + 4 = 7\n#### 7"):
    (run / "completions").mkdir(parents=True, exist_ok=True)
    for step in steps:
        problems = [f"What is {step} + {i // 8}?" for i in range(rows)]
        chats = [[{"role": "system", "content": "Work it out."}, {"role": "user", "content": p}] for p in problems]
        texts = [f"{text} ({step}.{i})" for i in range(rows)]
        answers = [[{"role": "assistant", "content": t}] for t in texts]
        table = {
            "step": [step] * rows,
            "prompt": chats if conversational else problems,
            "completion": answers if conversational else texts,
            "correctness_reward": [{5: None, 7: math.nan}.get(i, float(i % 3 == 0)) for i in range(rows)],
            "advantage": [0.75 - 0.25 * (i % 8) for i in range(rows)],
            "group": [i // 8 for i in range(rows)],
            "problem_id": problems,
            "gold": ["7"] * rows,
            "verdict": ["crash" if i == 5 else ("correct", "wrong", "no_answer")[i % 3] for i in range(rows)],
            "extracted": ["7"] * rows,
            "in_format": [True] * rows,
            "reward": [None if i == 5 else float(i % 3 == 0) for i in range(rows)],
            "tokens": [8] * rows,
            "truncated": [False] * rows,
        }
        write_table(pyarrow.table(table), run / "completions" / f"completions_{step:05d}.parquet")


def words(page, after, before):
    """The words of a page between two marks, without its markup."""
    part = page[page.index(after) + len(after) :].partition(before)[0]
    return " ".join(unescape(re.sub("<[^>]*>", " ", part)).split())


RIGHT_BEFORE = set(range(94))
RIGHT_AFTER = set(range(14, 204))
FIVE_STEPS = "".join(json.dumps({"step": step, "reward": 0.1 * step, "loss": 0.0}) + "\n" for step in range(1, 6))


def hostile_run(run):
    """Every text that a model, a data set or a config can choose is hostile."""
    for name, right in (("before", RIGHT_BEFORE), ("after", RIGHT_AFTER)):
        hostile = results(right, model=HOSTILE, data=HOSTILE, template=HOSTILE, versions={HOSTILE: HOSTILE})
        for row in hostile["rows"]:
            category = HOSTILE if row["category"] == "truncated" else row["category"]
            row |= dict.fromkeys(("problem", "gold", "completion", "answer", "verdict"), HOSTILE)
            row |= {"id": HOSTILE + row["id"], "category": category}
        (run / f"{name}.json").write_text(json.dumps(hostile))
    (run / "config.yaml").write_text(json.dumps({HOSTILE: HOSTILE, "list": [HOSTILE], "inner": {HOSTILE: HOSTILE}}))
    write_completions(run, [1, 2], text=HOSTILE)
    return run


@pytest.fixture(autouse=True)
def quick_to_draw(monkeypatch):
    """Draw each plot of a page once, and none as PNG: drawing is most of a report's time. test_plots.py draws.

    A PNG has only the text by which a later run knows it.
    """
    svg = page.svg
    monkeypatch.setattr(page, "png", lambda drawn: b"Software\0grpo_math")
    monkeypatch.setattr(page, "svg", lambda *drawn: SVGS.get(repr(drawn)) or SVGS.setdefault(repr(drawn), svg(*drawn)))


@pytest.fixture
def run(tmp_path):
    """A finished run: 94 of 256 right before, 190 after, of which 110 are gained and 14 lost."""
    path = tmp_path / "demo"
    path.mkdir()
    (path / "before.json").write_text(json.dumps(results(RIGHT_BEFORE)))
    (path / "after.json").write_text(json.dumps(results(RIGHT_AFTER, seed=1, adapter="adapter")))
    (path / "history.jsonl").write_text(FIVE_STEPS)
    (path / "config.yaml").write_text(
        "model_name_or_path: org/SmolLM2-135M-Instruct\nseed: 3\nsave_steps: 20.0\n"
        "learning_rate: 0.0003\nbaseline: group_mean\nhub_token: hf_verysecret\n"
        "peft: {r: 16, targets: [q_proj, v_proj]}\ndistributed_type: 'NO'\nnum_processes: 1\n"
        "command: grpo-math demo\nversions: {trl: 1.16.0, torch: 2.9.0}\n"
    )
    write_completions(path, range(10, 81, 10))
    return path

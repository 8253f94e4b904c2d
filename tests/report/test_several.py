"""Several runs on one page: what each came to, what they were given differently, and their curves."""

from __future__ import annotations

import json

import pytest
import yaml

from grpo_math.cli import main
from grpo_math.evaluation.compare import compare, read_results
from grpo_math.evaluation.figures import summary
from grpo_math.report.run_dir import read_run
from grpo_math.report.several import differing, report_several


def results(right, in_format=None, ids=range(40)):
    in_format = right if in_format is None else in_format
    rows = []
    for i in ids:
        category = "bad_format" if i >= right else "correct" if i < in_format else "correct_answer_bad_format"
        rows.append({"id": str(i), "problem": "p", "gold": "1", "completion": "c", "category": category})
    return {"format": 1, "grader": 12, "model": "tiny", "seconds": 30.0, **summary(rows), "rows": rows}


def a_run(folder, after, **config):
    folder.mkdir(parents=True)
    history = [{"step": s, "reward": s / 20, "accuracy": s / 20, "step_time": 5.0} for s in range(1, 21)]
    history.append({"step": 20, "heldout/accuracy": 0.5, "heldout/accuracy_in_format": 0.4, "heldout/n": 40})
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in history))
    (folder / "before.json").write_text(json.dumps(results(10)))
    (folder / "after.json").write_text(json.dumps(after))
    settings = {"seed": 1, "max_steps": 20, "hub_token": "hf_secret", "output_dir": str(folder)}
    (folder / "config.yaml").write_text(yaml.safe_dump({**settings, **config}))
    return folder


@pytest.fixture
def three(tmp_path):
    return [
        a_run(tmp_path / "low", results(20, 15), learning_rate=1e-5, rewards=["gsm8k"]),
        a_run(tmp_path / "high", results(30), learning_rate=1e-4, rewards=["gsm8k"]),
        a_run(tmp_path / "<b>other", results(25, ids=range(1, 41)), learning_rate=1e-4, rewards=["accuracy"]),
    ]


def test_the_table_has_each_run_with_its_intervals_and_its_difference_from_the_first(three):
    matches = report_several(three)
    first, second, third = matches.runs
    low, high = (read_results(three[i] / "after.json") for i in (0, 1))
    assert (first["before"]["accuracy"], first["after"]["accuracy"]) == (0.25, 0.5)
    assert (first["difference"]["difference"], first["after"]["accuracy_in_format"]) == (0.25, 0.375)
    assert (first["steps"], first["seconds"]) == (20, 160.0)
    assert first["against_first"] is None
    paired = compare(low, high)
    assert second["against_first"] == {"difference": 0.25, "ci95": [paired.lo, paired.hi]}
    assert third["difference"] is None  # other problems after than before
    assert any("the problems differ" in note for note in matches.notes)
    page = matches.html.read_text()
    for words in ("50.0%<br><small>", f"{100 * paired.lo:+.1f} to {100 * paired.hi:+.1f}", "25.0% → 37.5%"):
        assert words in page
    assert page.count("<svg ") == 3  # reward, accuracy, held-out accuracy; no lengths were logged
    assert "&lt;b&gt;other" in page
    assert "<b>other" not in page
    assert "hf_secret" not in page
    assert differing([read_run(folder) for folder in three]) == {
        "learning_rate": ["1e-05", "0.0001", "0.0001"],
        "rewards": ['["gsm8k"]', '["gsm8k"]', '["accuracy"]'],
    }


def test_the_command_writes_one_page_beside_the_runs_or_where_it_is_told(three, tmp_path, capsys):
    assert main(["report", *map(str, three[:2])]) == 0
    assert capsys.readouterr().out == f"report   {tmp_path / 'comparison.html'}\n"
    assert main(["report", *map(str, three), "--output", str(tmp_path / "own.html"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["html"] == str(tmp_path / "own.html")
    assert main(["report", str(three[0]), "--output", "x.html"]) == 2
    assert "--output would be ignored with one run" in capsys.readouterr().err

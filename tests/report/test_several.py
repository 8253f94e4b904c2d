"""Several runs on one page: what each came to, what they were given differently, and their curves."""

import json
import re

import pytest
import yaml
from synthetic_run import evaluation, results, words

from grpo_math.cli import main
from grpo_math.errors import ConfigError
from grpo_math.evaluation.paired import compare
from grpo_math.report.page import report, report_several


def right(number, n=40):
    """An evaluation whose first problems are right; the sixth and the eighteenth in another format."""
    return results({*range(number)}, n)


def evaluated(number):
    return evaluation({*range(number)}, 40)


def a_run(folder, after, **config):
    folder.mkdir(parents=True)
    history = [{"step": s, "reward": s / 20, "accuracy": s / 20, "step_time": 5.0} for s in range(1, 21)]
    history.append({"step": 20, "heldout/accuracy": 0.5, "heldout/accuracy_in_format": 0.4, "heldout/n": 40})
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in history))
    (folder / "before.json").write_text(json.dumps(right(10)))
    (folder / "after.json").write_text(json.dumps(after))
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"seed": 1, "max_steps": 30, "hub_token": "hf_secret", "output_dir": str(folder), **config})
    )
    return folder


@pytest.fixture
def three(tmp_path):
    return [
        a_run(tmp_path / "low", right(20), learning_rate=1e-5, rewards=["gsm8k"]),
        a_run(tmp_path / "high", right(30), learning_rate=1e-4, rewards=["gsm8k"]),
        a_run(tmp_path / "<b>other", right(24, n=41), learning_rate=1e-4, rewards=["accuracy"]),
    ]


def test_runs_that_differ_in_the_seed_alone_have_a_mean_difference_over_seeds(tmp_path, capsys):
    runs = [a_run(tmp_path / f"seed{seed}", right(10 + 4 * seed), seed=seed) for seed in (1, 2, 3)]
    seeds = report_several(runs)["seeds"]
    # 10, 20 and 30 points: a mean of 20, and 4.303 * 10 / sqrt(3) on either side.
    assert seeds == {"n": 3, "difference": pytest.approx(0.2), "ci95": pytest.approx([-0.0484, 0.4484], abs=1e-4)}
    line = "+20.0 points [-4.8, +44.8] over 3 seeds"
    assert main(["report", *map(str, runs)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"seeds    {line}"
    assert "over problems, not over seeds" in (tmp_path / "comparison.html").read_text()
    assert line in report(runs[1]).html.read_text()
    others = [runs[0], a_run(tmp_path / "other", right(30), seed=4, learning_rate=1e-4)]
    assert report_several(others)["seeds"] is None
    assert report_several([runs[0], a_run(tmp_path / "again", right(30))])["seeds"] is None


def test_the_table_has_each_run_with_its_intervals_and_its_difference_from_the_first(three, tmp_path):
    answer = report_several(three)
    first, second, third = answer["runs"]
    gained = compare(evaluated(10), evaluated(20)).accuracy
    figures = ("accuracy", "accuracy_in_format", "ci95", "n")
    assert first == {
        "run_dir": str(three[0]),
        "model": "SmolLM2-135M-Instruct",
        "step": 20,
        "steps": 30,
        "n": 40,
        "before": {name: right(10)[name] for name in figures},
        "after": {name: right(20)[name] for name in figures},
        "difference": {"difference": 0.25, "ci95": [gained.lo, gained.hi]},
        "against_first": None,
        "seconds": 20 * 5.0 + 2 * 12.5,
    }
    paired = compare(evaluated(20), evaluated(30)).accuracy
    assert second["against_first"] == {"difference": 0.25, "ci95": [paired.lo, paired.hi]}
    assert third["difference"] is None
    reason = "the problems differ (before 40, after 41, in one only 1, such as 'sums-40')"
    assert [note.partition(": evaluate")[0] for note in answer["notes"]] == [
        f"<b>other: not compared with low: {reason}",
        f"<b>other: accuracy 25.0% before and 58.5% after training are not compared: {reason}",
    ]
    page = (tmp_path / "comparison.html").read_text()
    assert words(page, "<tbody>", "</tbody>") == (
        "A low SmolLM2-135M-Instruct 20 of 30 25.0% 14.2% to 40.2% 50.0% 35.2% to 64.8% +25.0 +12.5 to +37.5 "
        "22.5% → 45.0% – 2 min B high SmolLM2-135M-Instruct 20 of 30 25.0% 14.2% to 40.2% 75.0% 59.8% to 85.8% "
        "+50.0 +35.0 to +65.0 22.5% → 67.5% +25.0 +12.5 to +37.5 2 min C <b>other SmolLM2-135M-Instruct 20 of 30 "
        "25.0% 14.2% to 40.2% 58.5% 43.4% to 72.2% – 22.5% → 53.7% – 2 min"
    )
    # No lengths were logged.
    titles = ["Held-out accuracy", "Accuracy of training completions", "Reward"]
    assert re.findall(r'<svg [^>]*aria-label="([^"]*)"', page) == titles
    assert ("&lt;b&gt;other" in page, "<b>other" in page, "hf_secret" in page) == (True, False, False)
    assert answer["settings"] == {
        "learning_rate": ["1e-05", "0.0001", "0.0001"],
        "rewards": ['["gsm8k"]', '["gsm8k"]', '["accuracy"]'],
    }


def test_the_command_writes_one_page_beside_the_runs_or_where_it_is_told(three, tmp_path, capsys):
    assert main(["report", *map(str, three[:2])]) == 0
    assert capsys.readouterr().out == f"report   {tmp_path / 'comparison.html'}\n"
    assert main(["report", *map(str, three), "--output", str(tmp_path / "own.html"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["html"] == str(tmp_path / "own.html")
    assert err.startswith("note: <b>other: not compared with low: ")
    assert main(["report", str(three[0]), "--output", "x.html"]) == 2
    assert "--output would be ignored with one run" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="run_dir=7 are too many runs for a page: give at most 6"):
        report_several(three[:1] * 7)

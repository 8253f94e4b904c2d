"""Several runs: what each came to, and what they were given differently."""

import json

import pytest
import yaml
from synthetic_run import evaluation, results

from grpo_math.cli import main
from grpo_math.evaluation.paired import compare
from grpo_math.evaluation.stats import over_seeds
from grpo_math.report.several import compare_runs


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
    seeds = compare_runs(runs)[0]["seeds"]
    # 10, 20 and 30 points: a mean of 20, and 4.303 * 10 / sqrt(3) on either side.
    assert seeds == {"n": 3, "difference": pytest.approx(0.2), "ci95": pytest.approx([-0.0484, 0.4484], abs=1e-4)}
    line = "+20.0 points [-4.8, +44.8] over 3 seeds"
    assert main(["report", *map(str, runs)]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["seed: 1; 2; 3", f"seeds    {line}"]
    others = [runs[0], a_run(tmp_path / "other", right(30), seed=4, learning_rate=1e-4)]
    assert compare_runs(others)[0]["seeds"] is None
    assert compare_runs([runs[0], a_run(tmp_path / "again", right(30))])[0]["seeds"] is None


def test_the_table_has_each_run_and_its_difference_from_the_first(three):
    answer, text = compare_runs(three)
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
    assert [" ".join(line.split()) for line in text.splitlines()[1:4]] == [
        "low 20 40 25.0% 50.0% +25.0 points [+12.5, +37.5]",
        "high 20 40 25.0% 75.0% +50.0 points [+35.0, +65.0] +25.0 points [+12.5, +37.5]",
        "<b>other 20 41 25.0% 58.5%",
    ]
    assert text.splitlines()[4:] == [
        "learning_rate: 1e-05; 0.0001; 0.0001",
        'rewards: ["gsm8k"]; ["gsm8k"]; ["accuracy"]',
    ]
    assert answer["settings"] == {
        "learning_rate": ["1e-05", "0.0001", "0.0001"],
        "rewards": ['["gsm8k"]', '["gsm8k"]', '["accuracy"]'],
    }


def test_the_command_prints_the_table_and_the_notes(three, capsys):
    assert main(["report", *map(str, three[:2])]) == 0
    assert capsys.readouterr().out.splitlines()[0].split()[:5] == ["steps", "n", "before", "after", "difference,"]
    assert main(["report", *map(str, three), "--json"]) == 0
    out, err = capsys.readouterr()
    assert [run["run_dir"] for run in json.loads(out)["runs"]] == [*map(str, three)]
    assert err.startswith("note: <b>other: not compared with low: ")


def test_more_seeds_than_the_table_of_students_quantiles_have_its_last():
    assert over_seeds([0.1, 0.3] * 6).ci95[1] > over_seeds([0.1, 0.3] * 60).ci95[1] > 0.2

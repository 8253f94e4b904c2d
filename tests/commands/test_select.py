"""`grpo-math select`: a run's completions as data for supervised fine-tuning."""

import json

import pandas
import pytest

from grpo_math.cli import main


def rows_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_completion_is_written_once_and_by_default_only_if_it_is_worth_learning(run, tmp_path, capsys):
    files = [tmp_path / name for name in ("all.jsonl", "worth.jsonl")]
    assert main(["select", str(run), "--all", "--to", str(files[0])]) == 0
    assert main(["select", str(run), "--to", str(files[1]), "--json"]) == 0
    everything, worth = map(rows_of, files)
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (answer["file"], answer["rows"]) == (str(files[1]), len(worth))
    assert answer["left_out"]["not correct"]
    assert 0 < len(worth) < len(everything)
    assert all(row in everything for row in worth)
    assert len({json.dumps(row) for row in everything}) == len(everything)
    assert {tuple(row) for row in everything} == {("prompt", "completion")}


ROW = {
    "prompt": "1 + 1?",
    "completion": "a",
    "verdict": "correct",
    "in_format": True,
    "truncated": False,
    "reward": 1.0,
}


@pytest.mark.parametrize(
    ("changes", "options", "rows", "line"),
    [
        ([{}, {"verdict": "wrong"}], [], 1, "left out: 1 not correct"),
        ([{}, {"in_format": False, "reward": 0.0}], [], 1, "left out: 1 outside the format"),
        ([{}, {"truncated": True}], [], 1, "left out: 1 cut at the limit"),
        ([{}, {}], [], 1, "left out: 1 repeated"),
        ([{"completion": text} for text in "abcdef"], [], 4, "left out: 2 more than 4 of a problem"),
        ([{"completion": text} for text in "abcdef"], ["--per_problem", "0"], 6, ""),
        ([{}, {"completion": "b", "reward": 0.5}], ["--min_reward", "0.6"], 1, "left out: 1 below the reward 0.6"),
        ([{"in_format": None}, {"completion": "b", "truncated": None}], [], 2, ""),
        ([{}, {"completion": "b", "verdict": "wrong"}], ["--all"], 2, ""),
    ],
)
def test_what_is_not_worth_learning_is_left_out_and_counted(changes, options, rows, line, tmp_path, capsys):
    (tmp_path / "completions").mkdir()
    pandas.DataFrame([ROW | change for change in changes]).to_parquet(
        tmp_path / "completions/completions_00001.parquet"
    )
    assert main(["select", str(tmp_path), "--to", str(tmp_path / "sft.jsonl"), *options]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [line] * bool(line)
    assert len(rows_of(tmp_path / "sft.jsonl")) == rows


@pytest.mark.parametrize(("options", "message"), [(["--to", "old"], "exists"), (["--to", "new"], "has no completions")])
def test_a_file_is_not_overwritten_and_a_run_needs_completions(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").touch()
    assert main(["select", ".", *options]) == 2
    assert message in capsys.readouterr().err

"""`grpo-math select`: a run's completions as data for supervised fine-tuning."""

import json

import pytest

from grpo_math.cli import main


def rows_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_completion_is_written_once_and_right_selects_by_verdict(run, tmp_path, capsys):
    files = [tmp_path / name for name in ("all.jsonl", "right.jsonl")]
    assert main(["select", str(run), "--to", str(files[0])]) == 0
    assert main(["select", str(run), "--to", str(files[1]), "--right", "--json"]) == 0
    everything, right = map(rows_of, files)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"file": str(files[1]), "rows": len(right)}
    assert 0 < len(right) < len(everything)
    assert all(row in everything for row in right)
    assert len({json.dumps(row) for row in everything}) == len(everything)
    assert {tuple(row) for row in everything} == {("prompt", "completion")}


@pytest.mark.parametrize(("options", "message"), [(["--to", "old"], "exists"), (["--to", "new"], "has no completions")])
def test_a_file_is_not_overwritten_and_a_run_needs_completions(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").touch()
    assert main(["select", ".", *options]) == 2
    assert message in capsys.readouterr().err

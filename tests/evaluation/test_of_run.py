"""`grpo-math evaluate --run`: base and trained model of a run directory, evaluated alike and compared."""

from __future__ import annotations

import json

import pytest
from small_runs import write_adapter_run
from transformers import AutoModelForCausalLM

from grpo_math.cli import main
from grpo_math.evaluation import backends
from grpo_math.generation.models import load_tokenizer
from grpo_math.problems.datasets import load_problems
from grpo_math.run.resume import write_problems

ASKED = ["--data", "generated:sums", "--split", "heldout", "--n", "4", "--batch_size", "4"]


@pytest.fixture
def run(tiny, tmp_path):
    return write_adapter_run(tmp_path / "run", tiny(), 'prompt_template: "boxed"  # quoted\nmax_completion_length: 6\n')


@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_base_and_trained_are_asked_the_same_and_compared(kind, run, tiny, capsys, monkeypatch):
    if kind == "model":
        (run / "adapter").rename(run / "checkpoint-1")
        model = AutoModelForCausalLM.from_pretrained(tiny())
        model.lm_head.weight.data.mul_(-1)
        model.save_pretrained(run / "model")
        load_tokenizer(tiny()).save_pretrained(run / "model")
    write_problems(run, load_problems("generated:sums", "heldout", limit=3))
    assert main(["evaluate", "--run", str(run), *ASKED]) == 0
    text, err = capsys.readouterr()
    assert f"warning: 3 of the 4 problems of generated:sums are training problems of {run}: " in err
    assert "95% paired interval" in text
    assert "evaluation/trained.json" in text
    base, trained = (json.loads((run / f"evaluation/{name}.json").read_text()) for name in ("base", "trained"))
    assert {name for name in base if base[name] != trained[name]} >= {"weights_hash", "rows"}
    for name in ("data", "split", "template", "max_new_tokens", "prompt_hash", "problems_hash", "samples"):
        assert base[name] == trained[name]
    assert (base["template"], base["max_new_tokens"], base["n"]) == ("boxed", 6, 4)
    assert (base["model"], base["adapter"]) == (tiny(), None)
    assert (trained["model"], trained["adapter"]) == (
        (tiny(), str(run / "adapter")) if kind == "adapter" else (str(run / "model"), None)
    )
    monkeypatch.setattr(backends.Model, "generator", None)  # it goes on where it was: all answers are there
    assert main(["evaluate", "--run", str(run), *ASKED, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer.keys() == {"base", "trained", "comparison"}
    assert answer["trained"]["results"] == str(run / "evaluation/trained.json")
    assert answer["base"]["n"] == answer["comparison"]["n"] == 4
    assert main(["evaluate", "--run", str(run), *ASKED, "--output", "one.json"]) == 2
    assert "output='one.json' is one file, and --run writes two: give a folder" in capsys.readouterr().err


def test_a_run_that_has_not_finished_is_refused_in_one_line(run, capsys):
    (run / "adapter").rename(run / "checkpoint-1")
    capsys.readouterr()  # of the loading
    assert main(["evaluate", "--run", str(run), *ASKED]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has neither adapter/ nor model/, so it has not finished: repeat the command that started it" in line
    (run / "config.yaml").write_text("- a list")
    assert main(["evaluate", "--run", str(run), *ASKED]) == 2
    assert "holds no config.yaml that names a model" in capsys.readouterr().err

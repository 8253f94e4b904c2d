"""`grpo-math evaluate --run`: base and trained model of a run directory, evaluated alike and compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_math.cli import main
from grpo_math.evaluation import backends
from grpo_math.problems.datasets import load_problems
from grpo_math.run.resume import write_problems

ASKED = ["--data", "generated:sums", "--split", "heldout", "--n", "4", "--batch_size", "4"]


@pytest.fixture
def run(tiny, tmp_path):
    """A function: the directory of a run that has finished, with an adapter or a whole model that is another one."""

    def make(kind: str) -> Path:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        from grpo_math.generation.models import load_tokenizer

        folder = tmp_path / "run"
        folder.mkdir()
        text = f'model_name_or_path: "{tiny()}"  # quoted\nprompt_template: "boxed"\nmax_completion_length: 6\n'
        (folder / "config.yaml").write_text(text)
        model = AutoModelForCausalLM.from_pretrained(tiny())
        if kind == "adapter":
            config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
            get_peft_model(model, config).save_pretrained(folder / "adapter")
        elif kind == "model":
            model.lm_head.weight.data.mul_(-1)
            model.save_pretrained(folder / "model")
            load_tokenizer(tiny()).save_pretrained(folder / "model")
        return folder

    return make


@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_base_and_trained_are_asked_the_same_and_compared(kind, run, tiny, capsys, monkeypatch):
    folder = run(kind)
    write_problems(folder, load_problems("generated:sums", "heldout", limit=3))
    assert main(["evaluate", "--run", str(folder), *ASKED]) == 0
    text, err = capsys.readouterr()
    assert f"warning: 3 of the 4 problems of generated:sums are training problems of {folder}: " in err
    assert "95% paired interval" in text
    assert "evaluation/trained.json" in text
    base, trained = (json.loads((folder / f"evaluation/{name}.json").read_text()) for name in ("base", "trained"))
    assert {name for name in base if base[name] != trained[name]} >= {"weights_hash", "rows"}
    for name in ("data", "split", "template", "max_new_tokens", "prompt_hash", "problems_hash", "samples"):
        assert base[name] == trained[name]
    assert (base["template"], base["max_new_tokens"], base["n"]) == ("boxed", 6, 4)
    assert (base["model"], base["adapter"]) == (tiny(), None)
    assert (trained["model"], trained["adapter"]) == (
        (tiny(), str(folder / "adapter")) if kind == "adapter" else (str(folder / "model"), None)
    )
    monkeypatch.setattr(backends.Model, "generator", None)  # it goes on where it was: all answers are there
    assert main(["evaluate", "--run", str(folder), *ASKED, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer.keys() == {"base", "trained", "comparison"}
    assert answer["trained"]["results"] == str(folder / "evaluation/trained.json")
    assert answer["base"]["n"] == answer["comparison"]["n"] == 4


def test_a_run_that_has_not_finished_is_refused_in_one_line(run, capsys):
    folder = run("nothing")
    capsys.readouterr()  # of the loading
    assert main(["evaluate", "--run", str(folder), *ASKED]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has neither adapter/ nor model/, so it has not finished: repeat the command that started it" in line
    (folder / "config.yaml").write_text("- a list")
    assert main(["evaluate", "--run", str(folder), *ASKED]) == 2
    assert "holds no config.yaml that names a model" in capsys.readouterr().err
    assert main(["evaluate", "--run", str(folder), *ASKED, "--output", "one.json"]) == 2
    assert "output='one.json' is one file, and --run writes two: give a folder" in capsys.readouterr().err

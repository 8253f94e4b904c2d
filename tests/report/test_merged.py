"""`grpo-math export`: one model in safetensors that answers as base and adapter do."""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel
from small_runs import write_adapter_run
from transformers import AutoModelForCausalLM

from grpo_math.cli import main
from grpo_math.generation.models import load_tokenizer


@pytest.fixture
def run(tiny, tmp_path):
    return write_adapter_run(tmp_path / "run", tiny(), "prompt_template: gsm8k\n")


@pytest.mark.slow
def test_the_merged_model_gives_the_adapters_log_probs(run, tiny, tmp_path, capsys):
    target = tmp_path / "Whole"
    assert main(["export", str(run), "--merge", str(target)]) == 0
    assert capsys.readouterr().out == f"merged   {target}\n"
    assert not (target / "adapter_config.json").exists()
    base = AutoModelForCausalLM.from_pretrained(tiny())
    tokenizer, prompt = load_tokenizer(str(target)), [{"role": "user", "content": "2 + 2?"}]
    ids = tokenizer.apply_chat_template(prompt, return_tensors="pt", return_dict=True)["input_ids"]

    def logps(model):
        with torch.no_grad():
            return model(ids).logits.log_softmax(-1).gather(2, ids[..., None])

    before = logps(base)
    both = logps(PeftModel.from_pretrained(base, run / "adapter"))
    whole = logps(AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32))
    apart, moved = (whole - both).abs().mean(), (before - both).abs().mean()
    assert apart < min(0.2, moved / 4)  # the weights were rounded to bfloat16


@pytest.mark.parametrize(
    ("change", "target", "message"),
    [
        ("", "run", "exists: name a new folder"),
        ("full", "new", "has nothing to merge: all weights were trained"),
        ("unfinished", "new", "so it has not finished"),
        ("quantised", "new", "is stored quantised"),
        ("no base", "new", "model_name_or_path='nowhere/nothing' has no weights that can be loaded"),
    ],
)
def test_what_cannot_be_merged_is_one_line(change, target, message, run, capsys, monkeypatch):
    monkeypatch.chdir(run.parent)
    if change == "full":
        (run / "adapter").rename(run / "model")
        (run / "model/config.json").write_text("{}")
    elif change == "unfinished":
        (run / "adapter").rename(run / "checkpoint-1")
    elif change == "quantised":
        monkeypatch.setattr("transformers.PreTrainedModel.is_quantized", True, raising=False)
    elif change == "no base":
        (run / "config.yaml").write_text(json.dumps({"model_name_or_path": "nowhere/nothing"}))
    assert main(["export", "run", "--merge", target]) == 2
    assert message in capsys.readouterr().err

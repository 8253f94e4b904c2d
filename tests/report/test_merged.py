"""`grpo-math export`: one model in safetensors that says what base and adapter say."""

from __future__ import annotations

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
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_merged_model_gives_the_adapters_log_probs(dtype, run, tiny, tmp_path, capsys):
    target = tmp_path / "Whole"
    assert main(["export", str(run), "--merge", str(target), "--dtype", dtype]) == 0
    assert capsys.readouterr().out == f"merged   {target}\n"
    assert (target / "model.safetensors").exists()
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
    apart, moved = (whole - both).abs().mean().item(), (before - both).abs().mean().item()
    assert apart < (1e-4 if dtype == "float32" else 0.2)
    assert apart < moved / 4


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ("", ["--merge", "run"], "is not empty"),
        ("", ["--merge", "new", "--dtype", "int8"], "dtype='int8' is not known"),
        ("full", ["--merge", "new"], "has nothing to merge: all weights were trained"),
        ("unfinished", ["--merge", "new"], "so it has not finished"),
    ],
)
def test_what_cannot_be_merged_is_one_line(change, arguments, message, run, capsys, monkeypatch):
    monkeypatch.chdir(run.parent)
    if change == "full":
        (run / "adapter").rename(run / "model")
        (run / "model/config.json").write_text("{}")
    elif change:
        (run / "adapter").rename(run / "checkpoint-1")
    assert main(["export", "run", *arguments]) == 2
    assert message in capsys.readouterr().err

"""`grpo-math export`: one model in safetensors that says what base and adapter say."""

from __future__ import annotations

import json

import pytest
import torch

from grpo_math.cli import main
from grpo_math.errors import UserError
from grpo_math.generation.models import load_tokenizer
from grpo_math.report import merged


@pytest.fixture
def run(tiny, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(f"model_name_or_path: {tiny()}\ntemplate: gsm8k\n")
    lora = LoraConfig(r=8, lora_alpha=100, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(tiny()), lora).save_pretrained(folder / "adapter")
    return folder


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_merged_model_gives_the_adapters_log_probs(dtype, run, tiny, tmp_path, capsys):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    target = tmp_path / "Whole"
    assert main(["export", str(run), "--merge", str(target), "--dtype", dtype]) == 0
    out = capsys.readouterr().out
    assert f"convert_hf_to_gguf.py {target} --outfile whole.gguf" in out
    assert "ollama create whole -f Modelfile" in out
    assert (target / "model.safetensors").exists()
    assert not (target / "adapter_config.json").exists()
    base = AutoModelForCausalLM.from_pretrained(tiny())
    tokenizer, prompt = load_tokenizer(str(target)), [{"role": "user", "content": "2 + 2?"}]
    before = merged.logps(base, tokenizer, prompt)
    both = merged.logps(PeftModel.from_pretrained(base, run / "adapter"), tokenizer, prompt)
    whole = merged.logps(AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32), tokenizer, prompt)
    apart, moved = (whole - both).abs().mean().item(), (before - both).abs().mean().item()
    assert apart < (1e-4 if dtype == "float32" else 0.2)
    assert apart < moved / 4


def test_the_figures_of_the_check_are_answered(run, tmp_path, capsys):
    assert main(["export", str(run), "--merge", str(tmp_path / "whole"), "--dtype", "float32", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["apart"] < 1e-4 < answer["moved"]


def test_a_merge_that_is_not_the_adapter_is_said(run, tmp_path, monkeypatch):
    from peft.tuners.lora import LoraModel

    monkeypatch.setattr(LoraModel, "merge_and_unload", LoraModel.unload)  # the base alone
    with pytest.raises(UserError, match=r"nats a token from those of base and adapter: .* is not to be used"):
        merged.export(str(run), str(tmp_path / "whole"), "float32")


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

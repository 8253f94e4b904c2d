"""`grpo-math export`: one model in safetensors that answers as base and adapter do."""

import json

import pytest
import torch
from peft import PeftModel
from small_model import byte_tokenizer
from small_runs import write_adapter_run
from transformers import AutoModelForCausalLM

from grpo_math.cli import main
from grpo_math.generation.adapters import logps
from grpo_math.generation.models import load_tokenizer


@pytest.fixture
def run(small, tmp_path):
    return write_adapter_run(tmp_path / "run", small, "prompt_template: gsm8k\n")


def test_the_merged_model_gives_the_adapters_log_probs(run, small, tmp_path, capsys):
    target = tmp_path / "Whole"
    byte_tokenizer().save_pretrained(run / "adapter")
    (run / "adapter/chat_template.jinja").write_text("of the adapter")
    assert main(["export", str(run), "--merge", str(target), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": str(target)}
    assert not (target / "adapter_config.json").exists()
    assert load_tokenizer(str(target)).chat_template == "of the adapter"
    base, merged = (AutoModelForCausalLM.from_pretrained(folder) for folder in (small, target))
    assert merged.dtype == torch.bfloat16
    before, after = (logps(model, [0], list(range(1, 40))) for model in (base, merged.float()))
    both = logps(PeftModel.from_pretrained(base, run / "adapter"), [0], list(range(1, 40)))
    apart, moved = (after - both).abs().mean(), (before - both).abs().mean()
    assert apart < moved / 4  # the weights were rounded to bfloat16
    (run / "adapter/tokenizer_config.json").unlink()  # a script may not have saved it
    assert main(["export", str(run), "--merge", str(tmp_path / "second")]) == 0
    assert capsys.readouterr().out == f"merged   {tmp_path / 'second'}\n"
    assert load_tokenizer(str(tmp_path / "second")).chat_template == byte_tokenizer().chat_template


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

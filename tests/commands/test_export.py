"""`grpo-math export`: one model in safetensors that answers as base and adapter do."""

import json
import shutil
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from small_model import byte_tokenizer
from small_runs import write_adapter_run
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_math.cli import main
from grpo_math.generation.adapters import logps
from grpo_math.generation.models import load_tokenizer


@pytest.fixture
def run(small, tmp_path):
    settings = "prompt_template: gsm8k\nmodel_init_kwargs: {rms_norm_eps: 0.5}\n"
    return write_adapter_run(tmp_path / "run", small, settings)


def test_the_merged_model_gives_the_adapters_log_probs(run, small, tmp_path, capsys):
    target = tmp_path / "Whole"
    byte_tokenizer().save_pretrained(run / "adapter")
    (run / "adapter/chat_template.jinja").write_text("of the adapter")
    assert main(["export", str(run), "--merge", str(target), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"folder": str(target)}
    assert "Writing model shards" not in printed.err
    assert not (target / "adapter_config.json").exists()
    assert load_tokenizer(str(target)).chat_template == "of the adapter"
    base = AutoModelForCausalLM.from_pretrained(small, rms_norm_eps=0.5)  # as the run trained it
    merged = AutoModelForCausalLM.from_pretrained(target)
    assert (merged.dtype, merged.config.rms_norm_eps) == (torch.bfloat16, 0.5)
    before, after = (logps(model, [0], list(range(1, 40))) for model in (base, merged.float()))
    both = logps(PeftModel.from_pretrained(base, run / "adapter"), [0], list(range(1, 40)))
    apart, moved = (after - both).abs().mean(), (before - both).abs().mean()
    assert apart < moved / 4  # the weights were rounded to bfloat16
    best, second = (run / "adapter").rename(run / "checkpoint-1"), tmp_path / "second"
    (run / "best.json").write_text('{"path": "checkpoint-1"}')
    (best / "tokenizer_config.json").unlink()  # a script may not have saved it
    assert main(["export", str(run), "--merge", str(second), "--checkpoint", "best"]) == 0
    assert capsys.readouterr().out == f"merged   {second}\n"
    assert load_tokenizer(str(second)).chat_template == byte_tokenizer().chat_template
    assert (second / "model.safetensors").read_bytes() == (target / "model.safetensors").read_bytes()


def test_ctrl_c_leaves_no_part_of_a_model(run, tmp_path, monkeypatch):
    # The tokenizer comes after the model.
    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", Mock(side_effect=KeyboardInterrupt))
    assert main(["export", str(run), "--merge", str(tmp_path / "part")]) == 130
    assert not (tmp_path / "part").exists()


def test_a_folder_that_cannot_be_written_is_named_before_the_merge(run, capsys):
    for option in ("--merge", "--gguf"):
        assert main(["export", str(run), option, str(run / "config.yaml/x")]) == 2
        assert capsys.readouterr().err.startswith(f"error: {option[2:]}='{run}/config.yaml/x' cannot be written: ")


def test_an_adapter_of_tied_embeddings_is_not_merged_into_another_model(small, run, tmp_path, capsys):
    tied = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(small, tie_word_embeddings=True))
    tied.save_pretrained(small_tied := tmp_path / "tied")
    byte_tokenizer().save_pretrained(small_tied)
    torch.manual_seed(0)
    adapted = get_peft_model(
        tied, LoraConfig(r=4, lora_alpha=400, target_modules=["embed_tokens"], init_lora_weights=False)
    )
    shutil.rmtree(run / "adapter")
    adapted.save_pretrained(run / "adapter")
    (run / "config.yaml").write_text(json.dumps({"model_name_or_path": str(small_tied)}))
    assert main(["export", str(run), "--merge", str(tmp_path / "Whole")]) == 2
    [line] = capsys.readouterr().err.splitlines()[-1:]
    assert "gives another model than base and adapter: its logits differ by" in line
    assert not (tmp_path / "Whole").exists()


@pytest.mark.parametrize(
    ("settings", "weights", "quantised", "target", "message"),
    [
        ({}, "adapter", False, "run", "exists: name a new folder"),
        ({}, "model", False, "new", "has nothing to merge: all weights were trained"),
        ({}, "checkpoint-1", False, "new", "so it has not finished"),
        ({}, "adapter", True, "new", "is stored quantised"),
        (
            {"model_name_or_path": "nowhere/nothing"},
            "adapter",
            False,
            "new",
            "model_name_or_path='nowhere/nothing' has no weights that can be loaded",
        ),
    ],
)
def test_what_cannot_be_merged_is_one_line(
    settings, weights, quantised, target, message, small, run, capsys, monkeypatch
):
    monkeypatch.chdir(run.parent)
    (run / "config.yaml").write_text(json.dumps({"model_name_or_path": small, **settings}))
    (run / "adapter/config.json").write_text("{}")
    (run / "adapter").rename(run / weights)
    monkeypatch.setattr("transformers.PreTrainedModel.is_quantized", quantised, raising=False)
    assert main(["export", "run", "--merge", target]) == 2
    assert message in capsys.readouterr().err


CONVERTER = """
import sys
from pathlib import Path
model, _, target, *kind = sys.argv[1:]
assert kind == ["--outtype", "bf16"]
print("a line for people")
Path(target).write_bytes(Path(model, "model.safetensors").read_bytes())
"""


@pytest.mark.parametrize("weights", ["adapter", "model"])
def test_a_gguf_file_is_what_the_converter_makes_of_the_merged_model(weights, run, tmp_path, capsys, monkeypatch):
    """With a stand-in for llama.cpp's converter, which no package brings: it copies the weights that it is given."""
    byte_tokenizer().save_pretrained(run / "adapter")
    assert main(["export", str(run), "--merge", str(tmp_path / "whole")]) == 0
    whole = (tmp_path / "whole/model.safetensors").read_bytes()
    if weights == "model":  # a run that trained all weights
        (run / "adapter").rename(run / "other")
        (tmp_path / "whole").rename(run / "model")
    monkeypatch.setenv("GGUF_CONVERTER", str(tmp_path / "convert.py"))
    target = tmp_path / "new/demo.gguf"
    words = ["export", str(run), "--gguf", str(target), "--json"]
    assert main(words) == 2
    assert f"gguf='{target}' needs convert_hf_to_gguf.py of llama.cpp" in capsys.readouterr().err
    (tmp_path / "convert.py").write_text("raise ValueError('no such family')")
    assert main(words) == 2
    assert "convert.py failed: ValueError: no such family" in capsys.readouterr().err
    (tmp_path / "convert.py").write_text(CONVERTER)
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out) == {"gguf": str(target)}
    assert target.read_bytes() == whole
    assert [*target.parent.iterdir()] == [target]  # the merged model is removed

"""Run directories of 0.1.0 (tests/cases/run_of_0_1) are reported on, compared, and gone on from."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from launching import ROOT, run
from small_runs import history

from grpo_math.report import compare, read_results, report

CASES = ROOT / "tests/cases/run_of_0_1"


def base(folder: Path, tokenizer) -> None:
    """A tiny Llama whose weights depend on no version of torch: numpy promises that RandomState's draws stay."""
    import numpy
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": 49152, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, bos_token_id=1, eos_token_id=2, pad_token_id=2))
    draw = numpy.random.RandomState(0)
    for _, parameter in sorted(model.named_parameters()):
        if parameter.dim() > 1:
            parameter.data = torch.from_numpy(draw.standard_normal(tuple(parameter.shape)).astype("float32"))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("name", ["finished", "killed"])
def test_a_report_on_it_says_what_it_said(name, tmp_path):
    run_dir = shutil.copytree(CASES / name, tmp_path / name)
    files = report(run_dir)
    page = files.html.read_text()
    assert "95% paired interval" in page or name == "killed"
    assert len(files.plots) >= 1


def test_its_results_compare_with_each_other():
    before, after = (read_results(CASES / f"finished/{name}.json") for name in ("before", "after"))
    assert compare(before, after).difference == after["accuracy"] - before["accuracy"]


def test_it_goes_on_from_its_checkpoint_and_ends_as_the_old_code_did(tokenizer, tmp_path):
    import torch
    from safetensors.torch import load_file

    base(tmp_path / "model", tokenizer)
    shutil.copy(CASES / "recipe.yaml", tmp_path)
    run_dir = shutil.copytree(CASES / "killed", tmp_path / "killed")
    command = [sys.executable, "-m", "grpo_math.train", "--config", "recipe.yaml", "--output_dir", "killed"]
    run(command, cwd=tmp_path, PYTHONPATH=os.pathsep.join(map(str, (ROOT, ROOT / "tests/processes"))))
    ours, theirs = history(run_dir), history(CASES / "finished")
    assert [line["step"] for line in ours] == [line["step"] for line in theirs] == [1, 2, 3, 4]
    for name in ("loss", "reward", "grad_norm", "completions/mean_length"):
        assert [line[name] for line in ours] == pytest.approx([line[name] for line in theirs], rel=1e-4, abs=1e-6)
    adapters = [load_file(folder / "adapter/adapter_model.safetensors") for folder in (run_dir, CASES / "finished")]
    assert adapters[0].keys() == adapters[1].keys()
    for name, weights in adapters[1].items():
        torch.testing.assert_close(adapters[0][name], weights, rtol=1e-4, atol=1e-6)
    before, after = (json.loads((run_dir / f"{name}.json").read_text()) for name in ("before", "after"))
    rows = json.loads((CASES / "finished/after.json").read_text())["rows"]
    assert [row["completion"] for row in after["rows"]] == [row["completion"] for row in rows]
    assert compare(before, after).difference == after["accuracy"] - before["accuracy"]
    assert before["regraded"]["grader_hash"] == 1, "by 0.1.0; compared with what this grader says"
    kept = json.loads((run_dir / "before.grader-1.json").read_text())
    assert kept == json.loads((CASES / "killed/before.json").read_text())

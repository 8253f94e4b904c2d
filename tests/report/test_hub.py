"""Pushing to a local stand-in for the Hub, end to end, and loading back with peft and vLLM what was pushed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
import yaml
from hub_server import CUT, LOST, TOKENS, HubServer, Repository
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from grpo_math import evaluate
from grpo_math.cli import main
from grpo_math.generation.models import load_tokenizer
from grpo_math.problems.datasets import load_problems
from grpo_math.report import hub as module
from grpo_math.report import report
from grpo_math.run.checkpoints import FINISHED
from grpo_math.run.files import write_json
from grpo_math.run.log import write_config

ROOT = Path(__file__).parents[2]
TOKEN, READER = TOKENS
EVALUATED = {"dataset": "generated:sums", "split": "heldout", "limit": 4}
RESULTS = {"README.md", "config.yaml", "history.jsonl", "before.json", "after.json", "report.html"}
PLOTS = {"plots/training.png"}
ADAPTER = {"adapter_config.json", "adapter_model.safetensors"}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
ENVIRONMENT = {"HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}


@pytest.fixture
def hub(monkeypatch):
    """A Hub of this test's own, which this process pushes to as ada."""
    server = HubServer()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr(module, "WAITS", (0, 0))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    yield server
    server.stop()


@pytest.fixture
def push(capsys):
    """`grpo-math push` -> (exit code, answer, lines on stderr). No answer, line or traceback ever holds a token."""

    def pushed(run_dir, *words, code=0):
        capsys.readouterr()
        found = main(["push", str(run_dir), *words, "--json"])
        out, err = capsys.readouterr()
        assert TOKEN not in out + err
        assert "Traceback" not in err
        assert found == code, err
        lines = err.splitlines()
        assert sum(line.startswith("error: ") for line in lines) == (code != 0)
        return (json.loads(out) if code == 0 else None), lines

    return pushed


def settings_of(base: str, use_peft: bool) -> dict:
    about = {
        "model_name_or_path": base,
        "dataset": "generated:sums",
        "dataset_split": "train",
        "prompt_template": "gsm8k",
    }
    return {**about, "use_peft": use_peft, "lora_r": 4, "loss_type": "dapo", "hub_token": TOKEN, "learning_rate": 1e-5}


def write_run(folder: Path, base: str, use_peft: bool, std: float = 0.3) -> None:
    """What training leaves: weights with what transformers adds to them, an evaluation before and after, a report."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), load_tokenizer(base)
    rows = load_problems(**EVALUATED)
    options = {"tokenizer": tokenizer, "max_new_tokens": 8, "progress": False, "about": {"data": "generated:sums"}}
    folder.mkdir()
    write_json(folder / "before.json", evaluate(model, rows, **options))
    if use_peft:
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(std=std)
    write_json(folder / "after.json", evaluate(model, rows, **options))
    target = folder / ("adapter" if use_peft else "model")
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    for name in ("training_args.bin", "optimizer.pt", "README.md", "checksums.json"):
        (target / name).write_bytes(b"not to be pushed")
    (folder / "checkpoint-2").mkdir()
    (folder / "checkpoint-2" / "model.safetensors").write_bytes(b"not to be pushed")
    lines = [{"step": step, "loss": 0.0, "reward": step / 4, "accuracy": step / 4} for step in (1, 2)]
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_json(folder / FINISHED, {"step": 2, "weights": target.name})
    write_config(folder / "config.yaml", settings_of(base, use_peft), ["grpo_math.train", "--seed", "1"], "NO", 1)
    report(folder)


@pytest.fixture(scope="module")
def adapter_run(tmp_path_factory, tiny):
    folder = tmp_path_factory.mktemp("runs") / "sums"
    write_run(folder, tiny(), use_peft=True)
    return folder


@pytest.fixture(scope="module")
def model_run(tmp_path_factory, tiny):
    """All weights trained: 13 MB, LFS by size, and over two files."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    write_run(folder, tiny(), use_peft=False)
    (weights,) = (folder / "model").glob("*.safetensors")
    tensors = load_file(weights)
    weights.unlink()
    shards = {"embed": "model-00001-of-00002.safetensors", "": "model-00002-of-00002.safetensors"}
    shard_of = {name: next(file for part, file in shards.items() if part in name) for name in tensors}
    for file in shards.values():
        part = {name: tensor for name, tensor in tensors.items() if shard_of[name] == file}
        save_file(part, folder / "model" / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": shard_of}
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def holds(hub: HubServer, name: str, branch: str = "main") -> set[str]:
    return set(hub.repositories[name].branches[branch])


def content(hub: HubServer, name: str, path: str, branch: str = "main") -> bytes:
    return hub.objects[hub.repositories[name].branches[branch][path]]


# What is pushed


@pytest.mark.slow
def test_what_is_pushed_is_named_and_nothing_else_is(hub, push, adapter_run):
    answer, _ = push(adapter_run, "--repo_id", "ada/sums")
    assert answer["url"] == f"{hub.url}/ada/sums"
    pushed = holds(hub, "ada/sums")
    assert set(answer["files"]) == pushed
    assert pushed >= RESULTS | PLOTS | ADAPTER | TOKENIZER
    assert not {path for path in pushed if path.endswith((".bin", ".pt", ".pth", ".pkl"))}
    assert not {path for path in pushed if path.startswith("checkpoint")}
    assert (
        content(hub, "ada/sums", "adapter_model.safetensors")
        == (adapter_run / "adapter" / "adapter_model.safetensors").read_bytes()
    )
    assert b"not to be pushed" not in b"".join(hub.objects.values())
    assert TOKEN.encode() not in b"".join(hub.bodies)
    assert not hub.repositories["ada/sums"].private


@pytest.mark.slow
def test_a_dry_run_shows_what_would_be_pushed_and_asks_nobody(hub, push, adapter_run, monkeypatch, capsys):
    pushed, _ = push(adapter_run, "--repo_id", "ada/sums")
    card = content(hub, "ada/sums", "README.md").decode()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    shown, _ = push(adapter_run, "--repo_id", "ada/sums", "--dry-run")
    assert shown["card"] == card
    assert list(shown["files"]) == pushed["files"]
    assert shown["files"]["history.jsonl"] == (adapter_run / "history.jsonl").stat().st_size
    assert main(["push", str(adapter_run), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "# sums\n" in out
    assert f"{len(shown['files'])} files" in out


@pytest.mark.slow
def test_the_base_of_the_adapter_is_no_folder_of_this_machine(hub, push, adapter_run, tiny):
    push(adapter_run, "--repo_id", "ada/sums")
    said = json.loads(content(hub, "ada/sums", "adapter_config.json"))
    assert said["base_model_name_or_path"] == Path(tiny()).name
    assert said["r"] == 4
    push(adapter_run, "--repo_id", "ada/named", "--base_model", "lovelace/tiny-llama")
    assert json.loads(content(hub, "ada/named", "adapter_config.json"))["base_model_name_or_path"] == (
        "lovelace/tiny-llama"
    )
    assert b"base_model: lovelace/tiny-llama" in content(hub, "ada/named", "README.md")


@pytest.mark.slow
def test_the_repository_is_a_run_directory_that_the_report_reads(hub, push, adapter_run, tmp_path):
    push(adapter_run, "--repo_id", "ada/sums")
    for path in holds(hub, "ada/sums"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(content(hub, "ada/sums", path))
    assert main(["report", str(tmp_path)]) == 0


@pytest.mark.slow
def test_a_name_without_a_user_is_the_tokens_and_the_default_is_the_folders(hub, push, adapter_run):
    assert push(adapter_run)[0]["url"].endswith("/ada/sums")
    assert push(adapter_run, "--repo_id", "other")[0]["url"].endswith("/ada/other")


@pytest.mark.slow
def test_a_full_model_of_lfs_size_goes_to_a_private_repository_and_to_a_branch(hub, push, model_run):
    answer, _ = push(model_run, "--repo_id", "ada/whole", "--private", "--revision", "step-2")
    assert answer["url"].endswith("/ada/whole/tree/step-2")
    assert hub.repositories["ada/whole"].private
    assert holds(hub, "ada/whole") == set()
    pushed = holds(hub, "ada/whole", "step-2")
    assert {"config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"} | RESULTS <= pushed
    assert len(hub.lfs & set(hub.repositories["ada/whole"].branches["step-2"].values())) >= 2
    push(model_run, "--repo_id", "ada/whole", "--revision", "step-2")
    assert len(hub.repositories["ada/whole"].commits) == 1


@pytest.mark.slow
def test_the_merged_model_is_base_and_adapter_in_bfloat16_uploaded_in_parts(hub, push, adapter_run, tiny, tmp_path):
    hub.part_size = 1_000_000
    push(adapter_run, "--repo_id", "ada/merged", "--merge")
    assert not ADAPTER & holds(hub, "ada/merged")
    assert hub.times(r"PUT /object/\w+/\d+") > 5
    for path in holds(hub, "ada/merged"):
        if "/" not in path:
            (tmp_path / path).write_bytes(content(hub, "ada/merged", path))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert merged.dtype == torch.bfloat16
    from peft import PeftModel

    side_by_side = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny()), adapter_run / "adapter")
    ids = torch.tensor([[5, 6, 7, 300, 11]])
    expected, found = side_by_side(ids).logits, merged(ids).logits.float()
    assert (found - expected).abs().mean() < 0.03 * expected.abs().mean()
    assert (merged(ids).logits.float() - AutoModelForCausalLM.from_pretrained(tiny())(ids).logits).abs().mean() > 0.1
    assert not list(adapter_run.glob(".push-*"))


@pytest.mark.slow
def test_merging_after_training_in_4_bit_is_said(hub, push, adapter_run, tmp_path):
    run = changed(adapter_run, tmp_path, load_in_4bit=True)
    push(run, "--repo_id", "ada/merged", "--merge")
    card = content(hub, "ada/merged", "README.md").decode()
    assert "the figures below are of that model, and not of this one" in card
    assert "model-index" not in card


@pytest.mark.slow
def test_through_xet_the_weights_go_to_its_store_and_only_once(hub, push, adapter_run, tmp_path, monkeypatch):
    pytest.importorskip("hf_xet")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", False)
    monkeypatch.setenv("HF_XET_CACHE", str(tmp_path / "cache"))
    (tmp_path / "store").mkdir()
    hub.xet = f"local://{tmp_path / 'store'}"
    push(adapter_run, "--repo_id", "ada/sums")
    weights = adapter_run / "adapter" / "adapter_model.safetensors"
    sha = hashlib.sha256(weights.read_bytes()).hexdigest()
    assert hub.repositories["ada/sums"].branches["main"][weights.name] == sha

    def stored():
        return sum(path.stat().st_size for path in (tmp_path / "store").rglob("xorbs/xorbs/*") if path.is_file())

    size = stored()
    assert size > weights.stat().st_size / 2
    push(adapter_run, "--repo_id", "ada/sums")
    assert stored() == size
    assert len(hub.repositories["ada/sums"].commits) == 1
    assert hub.times("PUT") == 0


# Going on


@pytest.mark.slow
def test_a_second_push_of_the_same_run_has_nothing_to_do(hub, push, adapter_run):
    first, _ = push(adapter_run, "--repo_id", "ada/sums")
    uploads = hub.times("PUT")
    second, _ = push(adapter_run, "--repo_id", "ada/sums")
    assert first == second
    assert hub.times("PUT") == uploads
    assert len(hub.repositories["ada/sums"].commits) == 1


@pytest.mark.slow
def test_a_push_that_the_network_cut_goes_on_with_what_is_lacking(hub, push, model_run):
    def cut(line):
        if line.startswith("PUT") and hub.times("PUT") == 2:
            hub.stop()

    hub.before = cut
    _, lines = push(model_run, "--repo_id", "ada/whole", code=1)
    assert "the same command resumes the push" in lines[-1]
    assert hub.repositories["ada/whole"].commits == []
    there = set(hub.objects)
    hub.asked.clear()
    hub.before = lambda line: None
    hub.start()
    push(model_run, "--repo_id", "ada/whole")
    uploaded = {re.split("[/?]", line)[2] for line in hub.asked if line.startswith("PUT")}
    assert uploaded
    assert not uploaded & there
    assert len(hub.repositories["ada/whole"].commits) == 1


@pytest.mark.slow
def test_a_connection_that_breaks_in_the_middle_of_a_file_is_tried_again(hub, push, model_run):
    hub.trouble = [("PUT", CUT, ""), ("POST .*/commit", CUT, "")]
    push(model_run, "--repo_id", "ada/whole")
    assert hub.trouble == []
    assert len(hub.repositories["ada/whole"].commits) == 1


@pytest.mark.slow
def test_a_commit_whose_answer_is_lost_is_not_made_twice(hub, push, adapter_run):
    hub.trouble = [("POST .*/commit", LOST, "")]
    push(adapter_run, "--repo_id", "ada/sums")
    assert hub.trouble == []
    assert len(hub.repositories["ada/sums"].commits) == 1


@pytest.mark.slow
@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again_with_a_line(hub, push, adapter_run, status):
    hub.trouble = [("POST .*/create", status, "try again"), ("/commit/", status, "try again")]
    _, lines = push(adapter_run, "--repo_id", "ada/sums")
    assert hub.trouble == []
    assert f"push     HTTP {status}: again in 0 seconds" in lines
    assert len(hub.repositories["ada/sums"].commits) == 1


@pytest.mark.slow
def test_a_hub_that_stays_broken_ends_it_in_one_line(hub, push, adapter_run):
    hub.trouble = [("/commit/", 503, "down")] * 3
    _, lines = push(adapter_run, "--repo_id", "ada/sums", code=1)
    assert lines[-1] == ("error: ada/sums is not pushed (HTTP 503): the same command resumes the push")


# What is refused


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "code", "said"),
    [
        (("/commit/", 401, f"no {TOKEN}"), 2, "ada/sums is not pushed (HTTP 401, "),
        (("PUT /object", 403, f"{TOKEN} may not"), 2, "this token may not write there"),
        (("/commit/", 404, "gone"), 2, "it does not exist, or is hidden from this token"),
        (("/commit/", 400, "bad file"), 1, "ada/sums is not pushed (HTTP 400, "),
        (("/commit/", 413, "too large"), 1, "ada/sums is not pushed (HTTP 413, "),
        (("validate-yaml", 400, "bad card"), 1, "ada/sums is not pushed (HTTP 400, "),
        (("whoami", 401, "who?"), 2, "does not take this token (401): run hf auth login"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_the_hub_refuses_is_one_line_at_once(hub, push, adapter_run, trouble, code, said):
    hub.trouble = [trouble]
    _, lines = push(adapter_run, "--repo_id", "ada/sums", code=code)
    assert said in lines[-1]
    assert not any("again in" in line for line in lines)


def test_without_a_token_or_with_one_that_may_only_read_nothing_is_made(hub, push, adapter_run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", READER)
    _, lines = push(adapter_run, "--repo_id", "ada/sums", code=2)
    assert "may only read" in lines[-1]
    monkeypatch.setenv("HF_TOKEN", "hf_unknown_unknown")
    _, lines = push(adapter_run, "--repo_id", "ada/sums", code=2)
    assert "does not take this token (401)" in lines[-1]
    monkeypatch.delenv("HF_TOKEN")
    _, lines = push(adapter_run, "--repo_id", "ada/sums", code=2)
    assert lines[-1] == "error: the Hub wants a token, and there is none: run hf auth login, or set HF_TOKEN"
    assert hub.repositories == {}


@pytest.mark.slow
def test_somebody_elses_name_is_refused_and_an_organisations_is_not(hub, push, adapter_run):
    _, lines = push(adapter_run, "--repo_id", "babbage/sums", code=2)
    assert "babbage/sums is not pushed (HTTP 403, " in lines[-1]
    push(adapter_run, "--repo_id", "lovelace/sums")


@pytest.mark.slow
def test_private_is_refused_for_a_repository_that_is_public(hub, push, adapter_run):
    push(adapter_run, "--repo_id", "ada/sums")
    _, lines = push(adapter_run, "--repo_id", "ada/sums", "--private", code=2)
    assert "'ada/sums' is a public repository already: make it private in its settings" in lines[-1]


@pytest.mark.slow
def test_weights_of_another_shape_are_not_laid_beside(hub, push, adapter_run):
    push(adapter_run, "--repo_id", "ada/sums")
    _, lines = push(adapter_run, "--repo_id", "ada/sums", "--merge", code=2)
    assert "contains adapter_config.json, which would be loaded with what is pushed" in lines[-1]
    assert len(hub.repositories["ada/sums"].commits) == 1


def changed(run: Path, folder: Path, **settings) -> Path:
    """A copy of a run with other settings."""
    copy = folder / run.name
    shutil.copytree(run, copy)
    config = yaml.safe_load((copy / "config.yaml").read_text())
    (copy / "config.yaml").write_text(yaml.safe_dump({**config, **settings}))
    return copy


def test_a_run_that_holds_a_token_is_not_published(hub, push, adapter_run, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "wandb0123456789")
    for number, secret in enumerate((TOKEN, "wandb0123456789")):
        run = changed(adapter_run, tmp_path / str(number), run_name=f"with {secret}")
        _, lines = push(run, "--repo_id", "ada/sums", code=2)
        assert "config.yaml of the run contains a token or key" in lines[-1]
    assert hub.repositories == {}


def test_a_run_without_weights_and_a_folder_without_a_run_are_refused(hub, push, adapter_run, tmp_path):
    run = changed(adapter_run, tmp_path)
    shutil.rmtree(run / "adapter")
    _, lines = push(run, "--repo_id", "ada/sums", code=2)
    assert "contains no adapter/ or model/ with *.safetensors" in lines[-1]
    (run / "config.yaml").unlink()
    _, lines = push(run, "--repo_id", "ada/sums", code=2)
    assert "contains no config.yaml" in lines[-1]
    _, lines = push(tmp_path / "nowhere", "--repo_id", "ada/sums", code=2)
    assert "contains no config.yaml" in lines[-1]
    assert hub.asked == []


def test_a_run_that_has_not_ended_is_refused_even_where_an_earlier_one_left_its_weights(
    hub, push, adapter_run, tmp_path
):
    run = changed(adapter_run, tmp_path)
    (run / FINISHED).unlink()
    _, lines = push(run, "--repo_id", "ada/sums", code=2)
    assert "has not finished: start the training again to resume it; then push" in lines[-1]
    hold = (
        f"from pathlib import Path; from grpo_math.run import lock; lock.hold(Path({str(run)!r})); print(1, flush=True)"
    )
    other = subprocess.Popen([sys.executable, "-c", f"{hold}; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        other.stdout.readline()
        _, lines = push(run, "--repo_id", "ada/sums", code=2)
    finally:
        other.communicate()
    assert re.search(rf"is in use: process {other.pid} on \S+ trains there: push when it has ended", lines[-1])
    assert hub.asked == []


def test_a_merge_that_cannot_be_is_refused(hub, push, adapter_run, model_run, tiny, tmp_path):
    _, lines = push(model_run, "--repo_id", "ada/x", "--merge", code=2)
    assert "merge=True would be ignored: all weights were trained" in lines[-1]
    base = tmp_path / "quantised"
    shutil.copytree(tiny(), base)
    about = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**about, "quantization_config": {"quant_method": "gptq", "bits": 4}}))
    run = changed(adapter_run, tmp_path, model_name_or_path=str(base))
    _, lines = push(run, "--repo_id", "ada/x", "--merge", code=2)
    assert "is stored quantised" in lines[-1]
    run = changed(adapter_run, tmp_path / "gone", model_name_or_path=str(tmp_path / "gone" / "base"))
    push(run, "--repo_id", "ada/x", "--merge", code=2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--repo_id", "datasets/ada/sums"], "repo_id='datasets/ada/sums' is not a name for a model repository"),
        (["--repo_id", "https://huggingface.co/ada/sums"], "is not a name for a model repository"),
        (["--repo_id", "ada/su ms"], "is not a name for a model repository"),
        (["--repo_id", "ada/sums--2"], "is not a name for a model repository"),
        (
            ["--repo_id", "ada/sums", "--base_model", "/models/mine"],
            "base_model='/models/mine' is not a name for a model",
        ),
        (["--repo_id", "ada/sums", "--privat"], "is not an option of grpo-math push"),
        (["--repo_id"], "expected one argument"),
    ],
)
def test_bad_arguments_are_one_line_before_the_hub_is_asked(hub, push, adapter_run, words, said):
    _, lines = push(adapter_run, *words, code=2)
    assert said in lines[-1]
    assert hub.asked == []


def test_offline_is_one_line(hub, push, adapter_run, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    _, lines = push(adapter_run, "--repo_id", "ada/sums", code=2)
    assert "repo_id='ada/sums' cannot be pushed to while HF_HUB_OFFLINE is set: unset it" in lines[-1]


def test_nobody_at_that_address_is_one_line(hub, push, adapter_run):
    hub.stop()
    _, lines = push(adapter_run, "--repo_id", "ada/sums", code=1)
    assert "ada/sums is not pushed (ConnectError)" in lines[-1].replace("OSError", "ConnectError")


def test_an_endpoint_with_a_password_in_it_is_refused_and_not_shown(hub, push, adapter_run, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url.replace("http://", "http://ada:pass4word@"))
    _, lines = push(adapter_run, "--repo_id", "ada/sums", code=2)
    assert lines[-1].startswith("error: HF_ENDPOINT='***' is not an address: ")
    assert not [line for line in lines if "pass4word" in line]


@pytest.mark.slow
def test_the_licence_of_a_base_on_the_hub_is_the_one_of_its_card(hub, push, adapter_run, tmp_path):
    hub.objects["card"] = (
        b"---\nlicense: other\nlicense_name: qwen-research\nlicense_link: https://x.y/z\n---\n# Base\n"
    )
    hub.repositories["lovelace/base"] = Repository(branches={"main": {"README.md": "card"}})
    run = changed(adapter_run, tmp_path, model_name_or_path="lovelace/base")
    push(run, "--repo_id", "ada/sums")
    card = content(hub, "ada/sums", "README.md").decode()
    assert "license: other\nlicense_name: qwen-research\nlicense_link: https://x.y/z\n" in card
    assert "[qwen-research](https://x.y/z)" in card
    run = changed(adapter_run, tmp_path / "2", model_name_or_path="lovelace/gone")
    push(run, "--repo_id", "ada/gone")
    assert "licence of the base model is not known" in content(hub, "ada/gone", "README.md").decode()


# Loading back

LOAD_BACK = """
import json, sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from grpo_math import evaluate, load_problems

base, repo, out = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(repo, padding_side="left")
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), repo).eval()
rows = load_problems("generated:sums", "heldout", limit=4)
results = evaluate(model, rows, tokenizer=tokenizer, max_new_tokens=8, progress=False)
logits = model(torch.tensor([[5, 6, 7, 300, 11]])).logits
json.dump({"rows": results["rows"], "logits": logits.flatten().tolist()}, open(out, "w"))
"""


def test_plain_peft_loads_it_back_with_the_same_logits_and_the_evaluations_answers(
    hub, push, adapter_run, tiny, tmp_path
):
    push(adapter_run, "--repo_id", "ada/sums", "--private")
    variables = {**os.environ, **ENVIRONMENT, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "-c", LOAD_BACK, tiny(), "ada/sums", str(tmp_path / "out.json")]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    from peft import PeftModel

    found = json.loads((tmp_path / "out.json").read_text())
    local = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny()), adapter_run / "adapter").eval()
    expected = local(torch.tensor([[5, 6, 7, 300, 11]])).logits.flatten()
    assert torch.equal(torch.tensor(found["logits"]), expected)
    after = json.loads((adapter_run / "after.json").read_text())
    before = json.loads((adapter_run / "before.json").read_text())
    names = ("id", "completion", "category")
    assert [[row[name] for name in names] for row in found["rows"]] == [[r[n] for n in names] for r in after["rows"]]
    assert [row["completion"] for row in before["rows"]] != [row["completion"] for row in after["rows"]]


@pytest.mark.skipif(not os.environ.get("GRPO_MATH_VLLM"), reason="GRPO_MATH_VLLM names no vllm to serve with")
def test_a_vllm_server_loads_it_from_the_hub_and_gives_the_evaluations_answers(
    hub, push, smollm, tmp_path, monkeypatch
):
    monkeypatch.undo()  # vLLM is waited for: no time to skip; what the push needs is in its own environment
    from vllm_process import Process

    run = tmp_path / "served"
    write_run(run, smollm, use_peft=True, std=0.08)
    variables = {**ENVIRONMENT, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "grpo_math.cli", "push", str(run), "--repo_id", "ada/served"]
    subprocess.run(command, env={**os.environ, **variables}, check=True, cwd=ROOT)

    class Serving(Process):
        extra = ("--enforce-eager", "--max-num-seqs", "16", "--lora-modules", "served=ada/served")

    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    process = Serving(smollm, tmp_path)
    try:
        before, after = (json.loads((run / f"{when}.json").read_text())["rows"] for when in ("before", "after"))
        assert sum(old["completion"] != new["completion"] for old, new in zip(before, after, strict=True)) >= 2
        same = 0
        for row, problem in zip(after, load_problems(**EVALUATED), strict=True):
            body = {"model": "served", "messages": problem["prompt"], "max_tokens": 8, "temperature": 0}
            asked = urllib.request.Request(
                f"{process.server.url}/v1/chat/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['VLLM_API_KEY']}"},
            )
            with urllib.request.urlopen(asked, timeout=120) as answer:
                said = json.loads(answer.read())["choices"][0]["message"]["content"]
            same += said.strip() == row["completion"].strip()
        assert same >= len(after) - 1  # bfloat16 there
    finally:
        process.stop()


# In training


def train(hub, tiny, run_dir, *words) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "grpo_math.cli", "train", "--model_name_or_path", tiny(), "--output_dir", run_dir]
    command += ["--max_steps", "2", "--use_peft", "--lora_target_modules", "all-linear", "--eval_n", "4"]
    command += ["--use_cpu=true", "--bf16=false", "--gradient_checkpointing=false", "--per_device_train_batch_size=4"]
    command += ["--num_generations=2", "--max_completion_length=8", "--dataset=generated:sums", "--eval_split=heldout"]
    variables = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", **ENVIRONMENT}
    variables.pop("HF_TOKEN")
    words = ("--push_to_hub", "--hub_token", TOKEN, "--save_steps", "1", *words)
    done = subprocess.run([*map(str, command), *words], env=variables, capture_output=True, text=True, cwd=ROOT)
    assert TOKEN not in done.stdout + done.stderr
    return done


@pytest.mark.full
def test_a_training_is_pushed_once_when_it_is_whole(hub, tiny, tmp_path):
    done = train(hub, tiny, tmp_path / "sums", "--hub_private_repo", "true")
    assert done.returncode == 0, done.stderr
    assert f"pushed   {hub.url}/ada/sums" in done.stdout
    (repository,) = hub.repositories.values()
    assert repository.private
    assert len(repository.commits) == 1, "transformers' own push stays off"
    assert holds(hub, "ada/sums") >= RESULTS | PLOTS | ADAPTER | TOKENIZER
    assert not {path for path in holds(hub, "ada/sums") if path.endswith((".bin", ".pt", ".pth"))}
    config = yaml.safe_load(content(hub, "ada/sums", "config.yaml"))
    assert config["push_to_hub"] is True
    assert TOKEN.encode() not in b"".join(hub.bodies)
    for path in (tmp_path / "sums").rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path


@pytest.mark.full
def test_a_push_that_fails_after_training_loses_nothing_and_names_the_command(hub, push, tiny, tmp_path):
    hub.trouble = [("POST /api/repos/create", 403, "storage is full")]
    run_dir = tmp_path / "sums"
    done = train(hub, tiny, run_dir, "--hub_model_id", "ada/later")
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    command = f"grpo-math push {run_dir} --repo_id ada/later"
    assert line.endswith(f": {command}")
    assert "storage is full" in line
    for name in ("after.json", "report.html", "adapter/adapter_model.safetensors", "checkpoint-2"):
        assert (run_dir / name).exists(), name
    assert hub.repositories == {}
    push(*command.split()[2:])
    assert holds(hub, "ada/later") >= ADAPTER


@pytest.mark.full
def test_a_training_whose_token_is_refused_does_not_begin(hub, tiny, tmp_path):
    hub.trouble = [("whoami", 401, "who?")]
    done = train(hub, tiny, tmp_path / "sums")
    assert done.returncode == 2
    assert "does not take this token (401)" in done.stderr
    assert not (tmp_path / "sums").exists()


def test_the_card_links_a_data_set_of_the_hub_and_tells_no_path_of_a_folder(tmp_path):
    from grpo_math.report import card

    assert card._link("owner/name:main").startswith("[owner/name](https://huggingface.co/datasets/owner/name)")
    assert card._link("aime2025").startswith("[math-ai/aime25](")
    assert card._name(f"{tmp_path}/private") == "private"
    assert card._name("generated:sums,word") == "generated:sums,word"

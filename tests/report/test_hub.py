"""Pushing to a local stand-in for the Hub, end to end, and loading back with peft what was pushed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from hub_server import TOKENS, HubServer, Repository
from launching import TINY
from peft import PeftModel
from small_runs import write_adapter_run
from synthetic_run import results
from transformers import AutoModelForCausalLM

from grpo_math.cli import main
from grpo_math.generation.models import load_tokenizer
from grpo_math.run.checkpoints import FINISHED
from grpo_math.run.files import write_json
from grpo_math.run.log import write_config

TOKEN, READER = TOKENS
RESULTS = {"README.md", "config.yaml", "history.jsonl", "before.json", "after.json", "report.html"}
PLOTS = {"plots/training.png"}
ADAPTER = {"adapter_config.json", "adapter_model.safetensors"}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


@pytest.fixture
def hub(monkeypatch):
    """A Hub of this test's own, which this process pushes to as ada."""
    server = HubServer()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    files = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", server.url)
    yield server
    server.stop()


@pytest.fixture
def push(capsys):
    """`grpo-math push` -> (exit code, answer, lines on stderr). No answer, line or traceback ever holds a token."""

    def pushed(run_dir, *words, code=0):
        capsys.readouterr()
        matches = main(["push", str(run_dir), *words, "--json"])
        out, err = capsys.readouterr()
        assert TOKEN not in out + err
        assert "Traceback" not in err
        assert matches == code, err
        lines = err.splitlines()
        assert sum(line.startswith("error: ") for line in lines) == (code != 0)
        return (json.loads(out) if code == 0 else None), lines

    return pushed


def write_run(folder: Path, base: str, kind: str) -> Path:
    """What training leaves: weights with what transformers adds to them, an evaluation before and after, a report."""
    write_adapter_run(folder, base)
    write_json(folder / "before.json", results({0}, n=4, data="generated:sums"))
    write_json(folder / "after.json", results({0, 1, 2}, n=4, data="generated:sums"))
    if kind == "model":
        shutil.rmtree(folder / "adapter")
        AutoModelForCausalLM.from_pretrained(base).save_pretrained(folder / kind)
    load_tokenizer(base).save_pretrained(folder / kind)
    for name in (f"{kind}/training_args.bin", f"{kind}/optimizer.pt", f"{kind}/README.md", "checkpoint-2.safetensors"):
        (folder / name).write_bytes(b"not to be pushed")
    lines = [{"step": step, "loss": 0.0, "reward": step / 4, "accuracy": step / 4} for step in (1, 2)]
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_json(folder / FINISHED, {"step": 2, "weights": kind})
    settings = {"model_name_or_path": base, "dataset": "generated:sums", "prompt_template": "gsm8k", "hub_token": TOKEN}
    write_config(folder / "config.yaml", settings, ["grpo_math.train", "--seed", "1"], "NO", 1)
    return folder


@pytest.fixture(scope="module")
def adapter_run(tmp_path_factory, tiny):
    return write_run(tmp_path_factory.mktemp("runs") / "sums", tiny(), "adapter")


@pytest.fixture(scope="module")
def model_run(tmp_path_factory, tiny):
    """All weights trained: 13 MB, LFS by size."""
    return write_run(tmp_path_factory.mktemp("runs") / "whole", tiny(), "model")


def holds(hub: HubServer, name: str, branch: str = "main") -> set[str]:
    return set(hub.repositories[name].branches[branch])


def content(hub: HubServer, name: str, path: str, branch: str = "main") -> bytes:
    return hub.objects[hub.repositories[name].branches[branch][path]]


# What is pushed


@pytest.mark.slow
def test_what_is_pushed_is_named_and_nothing_else_is_and_peft_loads_it_back(hub, push, adapter_run, tiny, tmp_path):
    answer, _ = push(adapter_run)
    assert answer["url"] == f"{hub.url}/ada/sums", "the default: the token's user, and the folder's name"
    pushed = holds(hub, "ada/sums")
    assert set(answer["files"]) == pushed
    assert pushed >= RESULTS | PLOTS | ADAPTER | TOKENIZER
    assert json.loads(content(hub, "ada/sums", "adapter_config.json"))["base_model_name_or_path"] == Path(tiny()).name
    assert b"not to be pushed" not in b"".join(hub.objects.values())
    assert TOKEN.encode() not in b"".join(hub.bodies)
    assert not hub.repositories["ada/sums"].private
    # A second push has nothing to do.
    uploads = hub.times("PUT")
    assert push(adapter_run, "--repo_id", "sums")[0] == answer
    assert hub.times("PUT") == uploads
    assert len(hub.repositories["ada/sums"].commits) == 1
    # The logits are those of the adapter, and not those of the base.
    base = AutoModelForCausalLM.from_pretrained(tiny())
    ids = torch.tensor([[5, 6, 7, 300, 11]])
    before = base(ids).logits
    loaded = PeftModel.from_pretrained(base, "ada/sums", cache_dir=str(tmp_path / "cache")).eval()(ids).logits
    local = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny()), adapter_run / "adapter").eval()
    assert torch.equal(loaded, local(ids).logits)
    assert not torch.equal(loaded, before)


@pytest.mark.slow
def test_a_full_model_of_lfs_size_goes_to_a_private_repository_and_to_a_branch(hub, push, model_run):
    answer, _ = push(model_run, "--repo_id", "ada/whole", "--private", "--revision", "step-2")
    assert answer["url"].endswith("/ada/whole/tree/step-2")
    assert hub.repositories["ada/whole"].private
    assert holds(hub, "ada/whole") == set()
    pushed = holds(hub, "ada/whole", "step-2")
    assert {"config.json", "model.safetensors"} | RESULTS <= pushed
    assert hub.repositories["ada/whole"].branches["step-2"]["model.safetensors"] in hub.lfs


@pytest.mark.slow
def test_the_card_has_the_name_and_the_licence_of_a_base_on_the_hub(hub, push, adapter_run):
    licence = "license: other\nlicense_name: qwen-research\nlicense_link: https://x.y/z\n"
    hub.objects["card"] = f"---\n{licence}---\n# Base\n".encode()
    hub.repositories["lovelace/base"] = Repository(branches={"main": {"README.md": "card"}})
    push(adapter_run, "--repo_id", "ada/named", "--base_model", "lovelace/base")
    card = content(hub, "ada/named", "README.md").decode()
    assert "base_model: lovelace/base" in card
    assert licence in card
    assert "[qwen-research](https://x.y/z)" in card


# What is refused


@pytest.mark.parametrize(
    ("variables", "repo_id", "output"),
    [
        ({"HF_TOKEN": READER}, "ada/sums", "may only read"),
        ({"HF_TOKEN": "hf_unknown_unknown"}, "ada/sums", "does not take this token (401)"),
        ({"HF_TOKEN": ""}, "ada/sums", "the Hub wants a token: run hf auth login, or set HF_TOKEN"),
        ({}, "datasets/ada/sums", "repo_id='datasets/ada/sums' is not a name for a model repository"),
        ({}, "ada/sums--2", "is not a name for a model repository"),
        ({"HF_HUB_OFFLINE": "1"}, "ada/sums", "cannot be pushed to while HF_HUB_OFFLINE is set: unset it"),
    ],
)
def test_what_the_hub_would_not_take_is_one_line(variables, repo_id, output, hub, push, adapter_run, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    _, lines = push(adapter_run, "--repo_id", repo_id, code=2)
    assert output in lines[-1]
    assert hub.repositories == {}


@pytest.mark.slow
def test_a_repository_that_is_public_or_has_other_weights_is_refused(hub, push, adapter_run, model_run):
    push(adapter_run, "--repo_id", "lovelace/sums")  # an organisation of ada's
    _, lines = push(adapter_run, "--repo_id", "lovelace/sums", "--private", code=2)
    assert "'lovelace/sums' is a public repository already: make it private in its settings" in lines[-1]
    _, lines = push(model_run, "--repo_id", "lovelace/sums", code=2)
    assert "contains adapter_config.json, which would be loaded with what is pushed" in lines[-1]
    _, lines = push(adapter_run, "--repo_id", "babbage/sums", code=1)  # another's
    assert "babbage/sums is not pushed (403 Forbidden" in lines[-1]
    assert len(hub.repositories["lovelace/sums"].commits) == 1


@pytest.mark.parametrize(
    ("changes", "removed", "output"),
    [
        ({"run_name": f"with {TOKEN}"}, None, "config.yaml of the run contains a token or key"),
        ({"run_name": "with wandb0123456789"}, None, "config.yaml of the run contains a token or key"),
        ({}, FINISHED, "has not finished: start the training again to resume it; then push"),
        ({}, "adapter", "contains no adapter/ or model/ with *.safetensors"),
        ({}, "config.yaml", "contains no config.yaml"),
    ],
)
def test_a_run_that_cannot_be_pushed_is_one_line(
    changes, removed, output, hub, push, adapter_run, tmp_path, monkeypatch
):
    monkeypatch.setenv("WANDB_API_KEY", "wandb0123456789")
    run = Path(shutil.copytree(adapter_run, tmp_path / "run"))
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | changes))
    if removed:
        (run / removed).rename(tmp_path / "removed")
    _, lines = push(run, "--repo_id", "ada/sums", code=2)
    assert output in lines[-1]
    assert hub.repositories == {}


# In training


@pytest.mark.full
def test_a_training_is_pushed_once_when_it_is_whole_and_a_push_that_fails_names_its_command(
    hub, push, tiny, tmp_path, monkeypatch, capsys
):
    monkeypatch.delenv("HF_TOKEN")
    run_dir = tmp_path / "sums"
    arguments = ["train", "--model_name_or_path", tiny(), "--output_dir", str(run_dir), *TINY, "--use_peft"]
    arguments += ["--max_steps=2", "--save_steps=1", "--eval_n=4", "--eval_split=heldout", "--report_to=none"]
    arguments += ["--push_to_hub", "--hub_private_repo=true", "--hub_model_id=ada/sums", "--hub_token", TOKEN]
    hub.trouble = [("POST /api/repos/create", 403, "storage is full")]
    assert main(arguments) == 1
    assert (run_dir / "adapter/adapter_model.safetensors").exists()
    out, err = capsys.readouterr()
    assert TOKEN not in out + err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "storage is full" in line
    assert line.endswith(f": grpo-math push {run_dir} --repo_id ada/sums --private")
    assert hub.repositories == {}
    assert main(arguments) == 0  # the run is finished; its push is not
    out, err = capsys.readouterr()
    assert TOKEN not in out + err
    assert f"pushed   {hub.url}/ada/sums" in out
    repository = hub.repositories["ada/sums"]
    assert repository.private
    assert len(repository.commits) == 1, "transformers' own push stays off"
    assert holds(hub, "ada/sums") >= RESULTS | PLOTS | ADAPTER | TOKENIZER
    assert TOKEN.encode() not in b"".join(hub.bodies)

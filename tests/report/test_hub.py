"""Pushing to a local stand-in for the Hub, end to end, and loading back with peft what was pushed."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hub_server import TOKENS, HubServer, Repository
from launching import TINY
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from small_model import byte_tokenizer
from small_runs import write_adapter_run
from synthetic_run import results
from transformers import AutoModelForCausalLM

from grpo_math.cli import main
from grpo_math.errors import PushError, UserError
from grpo_math.report import hub as hub_module
from grpo_math.report.finish import finish_run
from grpo_math.run.checkpoints import FINISHED
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
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name, value in {
        "constants.HF_HUB_OFFLINE": False,
        "constants.ENDPOINT": server.url,
        "constants.HUGGINGFACE_CO_URL_TEMPLATE": f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        "hf_api.api.endpoint": server.url,
    }.items():
        monkeypatch.setattr(f"huggingface_hub.{name}", value)
    yield server
    server.stop()


@pytest.fixture
def push(capsys):
    """`grpo-math push` -> (answer, text on stderr). No answer and no line ever holds a token."""

    def pushed(run_dir, *words, code=0):
        assert main(["push", str(run_dir), *words, "--json"]) == code
        out, err = capsys.readouterr()
        assert TOKEN not in out + err
        assert err.count("error: ") == (code != 0)
        return json.loads(out or "null"), err

    return pushed


@pytest.fixture(scope="module")
def adapter_run(tmp_path_factory, small):
    """What training leaves: weights with what transformers adds to them, and an evaluation before and after."""
    folder = write_adapter_run(tmp_path_factory.mktemp("runs") / "sums", small)
    (folder / "before.json").write_text(json.dumps(results({0}, n=4, data="generated:sums")))
    (folder / "after.json").write_text(json.dumps(results({0, 1, 2}, n=4, data="generated:sums")))
    byte_tokenizer().save_pretrained(folder / "adapter")
    for name in ("adapter/training_args.bin", "adapter/optimizer.pt", "adapter/README.md", "checkpoint-2.safetensors"):
        (folder / name).write_bytes(b"not to be pushed")
    (folder / "history.jsonl").write_text('{"step": 1, "loss": 0.0, "reward": 0.25, "accuracy": 0.25}\n')
    (folder / FINISHED).write_text('{"step": 2, "weights": "adapter"}')
    write_config(
        folder / "config.yaml",
        {"model_name_or_path": small, "model_revision": "v2", "dataset": "generated:sums", "hub_token": TOKEN},
        ["grpo_math.train", "--seed", "1"],
        "NO",
        1,
    )
    return folder


@pytest.fixture
def model_run(adapter_run, small, tmp_path):
    """All weights trained."""
    run = shutil.copytree(adapter_run, tmp_path / "whole", ignore=shutil.ignore_patterns("adapter"))
    return shutil.copytree(small, run / "model").parent


def pushed(hub: HubServer, name: str) -> dict[str, bytes]:
    """The files of a repository by path."""
    return hub.repositories[name].branches["main"]


# What is pushed


def test_what_is_pushed_is_named_and_nothing_else_is_and_peft_loads_it_back(hub, push, adapter_run, small, tmp_path):
    answer, _ = push(adapter_run)
    assert answer["url"] == f"{hub.url}/ada/sums", "the default: the token's user, and the folder's name"
    files = pushed(hub, "ada/sums")
    assert set(answer["files"]) == files.keys() == ADAPTER | TOKENIZER | RESULTS | PLOTS
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "small"
    assert not [name for name, content in files.items() if b"not to be pushed" in content or TOKEN.encode() in content]
    assert not hub.repositories["ada/sums"].private
    # A second push has nothing to do.
    assert push(adapter_run, "--repo_id", "sums")[0] == answer
    assert hub.repositories["ada/sums"].commits == 1
    base = AutoModelForCausalLM.from_pretrained(small)
    loaded = get_peft_model_state_dict(PeftModel.from_pretrained(base, "ada/sums", cache_dir=str(tmp_path / "cache")))
    torch.testing.assert_close(loaded, load_file(adapter_run / "adapter/adapter_model.safetensors"), rtol=0, atol=0)


def test_a_dry_run_lists_what_a_push_would_publish_and_publishes_nothing(hub, push, adapter_run, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    listed, _ = push(adapter_run, "--repo_id", "ada/sums", "--dry_run")
    assert hub.repositories == {}
    assert (listed["repo_id"], {*listed["files"]}) == ("ada/sums", ADAPTER | TOKENIZER | RESULTS | PLOTS)
    assert listed["files"]["adapter_model.safetensors"] > 10_000


def test_a_full_model_goes_to_a_private_repository_and_to_a_branch(hub, push, model_run):
    answer, _ = push(model_run, "--repo_id", "ada/whole", "--private", "--revision", "step-2")
    assert answer["url"].endswith("/ada/whole/tree/step-2")
    repository = hub.repositories["ada/whole"]
    assert (repository.private, repository.branches["main"]) == (True, {})
    assert {"config.json", "model.safetensors"} | RESULTS <= repository.branches["step-2"].keys()


def test_the_card_has_the_name_and_the_licence_of_a_base_on_the_hub(hub, push, adapter_run):
    licence = "license: other\nlicense_name: qwen-research\nlicense_link: https://x.y/z\n"
    hub.repositories["lovelace/base"] = Repository(branches={"v2": {"README.md": f"---\n{licence}---\n".encode()}})
    push(adapter_run, "--repo_id", "ada/named", "--base_model", "lovelace/base")
    card = pushed(hub, "ada/named")["README.md"].decode()
    assert "base_model: lovelace/base" in card
    assert licence in card
    assert "[qwen-research](https://x.y/z)" in card
    push(adapter_run, "--repo_id", "ada/secret", "--base_model", "lovelace/secret")
    assert b"The licence of the base model is unknown" in pushed(hub, "ada/secret")["README.md"]


def test_a_checkpoint_is_pushed_without_the_evaluation_of_the_last_weights(hub, push, model_run):
    (model_run / "model").rename(model_run / "checkpoint-2")
    push(model_run, "--repo_id", "ada/best", "--checkpoint", "checkpoint-2")
    files = pushed(hub, "ada/best")
    assert b"25.0% before training" in files["README.md"]
    assert b"| steps | checkpoint-2 of 2 |" in files["README.md"]
    assert RESULTS & files.keys() == RESULTS - {"after.json", "report.html"}
    assert not [name for name in ("after.json", "report.html") if f"`{name}`".encode() in files["README.md"]]


# What is refused


@pytest.mark.parametrize(
    ("variables", "changes", "repo_id", "message"),
    [
        ({"HF_TOKEN": READER}, {}, "ada/sums", "may only read"),
        ({"HF_TOKEN": "hf_unknown_unknown"}, {}, "ada/sums", "does not take this token (401)"),
        ({"HF_TOKEN": ""}, {}, "ada/sums", "the Hub requires a token: run hf auth login, or set HF_TOKEN"),
        ({}, {}, "datasets/ada/sums", "repo_id='datasets/ada/sums' is not a name for a model repository"),
        ({}, {}, "ada/sums--2", "is not a name for a model repository"),
        ({"HF_HUB_OFFLINE": "1"}, {}, "ada/sums", "cannot be pushed to while HF_HUB_OFFLINE is set: unset it"),
        ({}, {"config.yaml": f"run_name: with {TOKEN}"}, "ada/sums", "config.yaml of the run contains a token or key"),
        ({"MY_API_KEY": "key0123456789"}, {"config.yaml": "a: key0123456789"}, "ada/sums", "contains a token or key"),
        ({}, {FINISHED: None}, "ada/sums", "is not a run that has finished: give the run directory of a training"),
        ({}, {"adapter/adapter_config.json": None}, "ada/sums", "contains no adapter/ or model/ with *.safetensors"),
    ],
)
def test_what_cannot_be_pushed_is_one_line(
    variables, changes, repo_id, message, hub, push, adapter_run, tmp_path, monkeypatch
):
    run = Path(shutil.copytree(adapter_run, tmp_path / "run"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name, text in changes.items():
        (run / name).write_text(text) if text else (run / name).unlink()
    assert message in push(run, "--repo_id", repo_id, code=2)[1]
    assert hub.repositories == {}


def test_a_repository_that_is_public_or_has_other_weights_is_refused(hub, push, adapter_run, model_run):
    push(adapter_run, "--repo_id", "lovelace/sums")  # an organisation of ada's
    for run, code, words, message in (
        (
            adapter_run,
            2,
            ["lovelace/sums", "--private"],
            "'lovelace/sums' is a public repository already: make it private",
        ),
        (model_run, 2, ["lovelace/sums"], "contains adapter_config.json, which would be loaded with what is pushed"),
        (adapter_run, 1, ["babbage/sums"], "babbage/sums is not pushed (403 Forbidden"),  # another's
    ):
        assert message in push(run, "--repo_id", *words, code=code)[1]
    assert hub.repositories["lovelace/sums"].commits == 1


# At the end of a training


def test_the_end_of_a_training_reports_and_a_push_that_fails_names_its_command(
    adapter_run, tmp_path, monkeypatch, capsys
):
    run = Path(shutil.copytree(adapter_run, tmp_path / "my run"))
    config = SimpleNamespace(output_dir=run, hub_model_id=None, hub_private_repo=True, hub_revision=None)
    monkeypatch.setattr(hub_module, "push", pushing := Mock(return_value={"url": "http://hub/ada/sums"}))
    finish_run(config, run / "adapter", pushes=True)
    pushing.assert_called_once_with(run, None, private=True, revision=None)
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["before", "after", "difference", "95%", "paired", "interval"]
    assert out[-3:] == [f"report   {run}/report.html", f"adapter  {run}/adapter", "pushed   http://hub/ada/sums"]
    assert (
        json.loads((run / "adapter/files.json").read_text())["README.md"] == (run / "adapter/README.md").stat().st_size
    )
    for error, reason, private, revision, words in (
        (KeyboardInterrupt(), "interrupted", True, None, " --private"),
        (UserError("no token"), "no token", None, "v2", " --revision v2"),
        (UserError("no token"), "no token", False, None, ""),
    ):
        pushing.side_effect, config.hub_private_repo, config.hub_revision = error, private, revision
        with pytest.raises(PushError) as failed:
            finish_run(config, run / "adapter", pushes=True)
        pushing.assert_called_with(run, None, private=private, revision=revision)
        assert str(failed.value) == (
            f"the run is complete in {run}, but not on the Hub ({reason}): "
            f"grpo-math push '{run}' --repo_id my run{words}"
        )


@pytest.mark.full
def test_a_training_is_pushed_once_when_it_is_whole_and_a_push_that_fails_names_its_command(
    hub, push, tiny, tmp_path, monkeypatch, capsys
):
    monkeypatch.delenv("HF_TOKEN")
    run_dir = tmp_path / "sums"
    arguments = [
        *("train", "--model_name_or_path", tiny(), "--output_dir", str(run_dir), *TINY, "--use_peft"),
        *("--max_steps=2", "--save_steps=1", "--eval_n=4", "--eval_split=heldout", "--report_to=none"),
        *("--push_to_hub", "--hub_private_repo=true", "--hub_model_id=ada/sums", "--hub_token", TOKEN),
    ]
    hub.repositories["ada/sums"] = Repository()
    assert main(arguments) == 1
    assert f": grpo-math push {run_dir} --repo_id ada/sums --private\n" in capsys.readouterr().err
    del hub.repositories["ada/sums"]
    assert main(arguments) == 0  # the run is finished; its push is not
    assert f"pushed   {hub.url}/ada/sums" in capsys.readouterr().out
    repository = hub.repositories["ada/sums"]
    assert repository.private
    assert repository.commits == 1, "transformers' own push stays off"
    assert repository.branches["main"].keys() >= RESULTS | PLOTS | ADAPTER | TOKENIZER
    assert TOKEN.encode() not in b"".join(repository.branches["main"].values())

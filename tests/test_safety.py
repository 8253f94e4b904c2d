"""What must not happen: code of others is run, a token is written down, a key goes to another address."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from small_http import SmallHTTP, body_of, send

from grpo_math.errors import ConfigError
from grpo_math.generation.models import load_tokenizer
from grpo_math.generation.server import Server
from grpo_math.grading import Grade, Verdict
from grpo_math.rewards.judge import make_llm_judge
from grpo_math.run.http import ServerError
from grpo_math.settings import recipe

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "grpo_math").rglob("*.py"))
UNSAFE = {"pickle", "cPickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"}
MAY_ASK = {"run.http", "report.hub"}  # the modules that open a connection


def nodes(kind):
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kind):
                yield path, node


def name_of(call):
    return ast.unparse(call.func)


def keyword(call, name):
    return next((ast.unparse(one.value) for one in call.keywords if one.arg == name), None)


@pytest.mark.slow
def test_no_module_imports_a_format_that_runs_code():
    for path, node in nodes((ast.Import, ast.ImportFrom)):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        assert not {name.partition(".")[0] for name in names} & UNSAFE, f"{path}:{node.lineno}"


@pytest.mark.slow
def test_no_call_loads_code():
    for path, call in nodes(ast.Call):
        where, name = f"{path}:{call.lineno}", name_of(call)
        assert keyword(call, "trust_remote_code") in (None, "False"), where
        if name.startswith("Auto") and name.endswith(".from_pretrained"):  # else transformers asks on the terminal
            assert keyword(call, "trust_remote_code") == "False", where
        assert keyword(call, "allow_pickle") in (None, "False"), where
        if path.parts[-2:] != ("tools", "program.py"):  # a model's program, behind walls: tests/tools
            assert name not in ("eval", "exec", "os.system"), where
        assert keyword(call, "shell") in (None, "False"), where
        if name == "torch.load":
            assert keyword(call, "weights_only") == "True", where
        if name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"):
            assert len(call.args) == 2, where
            assert ast.unparse(call.args[1]) in ("_Strict", "yaml.SafeLoader"), where


def test_a_model_that_comes_with_code_is_refused_and_nobody_is_asked_to_run_it(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *question: "y")
    folder = tmp_path / "model"
    shutil.copytree(tiny(), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    with pytest.raises(ConfigError, match="contains custom code"):
        load_tokenizer(str(folder))
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_only_the_modules_that_are_meant_to_open_a_connection():
    for path, node in nodes((ast.Import, ast.ImportFrom)):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        roots = {name.partition(".")[0] for name in names}
        asks = "urllib.request" in names or roots & {"requests", "httpx", "aiohttp", "http"}
        assert not asks or ".".join(path.parts[-2:]).removesuffix(".py") in MAY_ASK, f"{path}:{node.lineno}"


class Recording(SmallHTTP):
    """Keeps what it is asked, and answers each request with ``status``, ``headers`` and ``text``."""

    status, headers, text = 200, {}, ""

    def __init__(self):
        self.asked = []
        super().__init__()

    def handle(self, request):
        self.asked.append((request.path, body_of(request).decode()))
        send(request, self.status, self.text.encode(), self.headers)


@pytest.fixture
def server():
    recording = Recording()
    yield recording
    recording.stop()


YES = json.dumps({"choices": [{"message": {"content": '{"equivalent": true}'}}]})


def ask_judge(address, **columns):
    told = make_llm_judge(base_url=address, model="m", api_key="sk-judge-fake", retries=0)
    grades = [Grade(Verdict.WRONG, "8", 0.0)]
    return told(prompts=["3 + 4?"], completions=["#### 8"], answer=["7"], grade=grades, **columns)


def test_the_judge_is_asked_where_it_was_configured_whatever_data_and_model_say(server):
    server.text = YES
    elsewhere = ["http://127.0.0.1:9/v1"]
    assert ask_judge(server.url, base_url=elsewhere, url=elsewhere, model=["other"], api_key=["x"]) == [1.0]
    ((path, body),) = server.asked
    assert path == "/chat/completions"
    assert json.loads(body)["model"] == "m"


@pytest.mark.parametrize("status", [301, 307])
def test_a_redirect_takes_no_key_to_another_address(status, server):
    server.status, server.headers = status, {"Location": f"{server.url}/elsewhere"}
    assert ask_judge(server.url) == [None]
    with pytest.raises(ServerError):
        Server(server.url, api_key="vllm-fake", retries=0).load_adapter("a", "b")
    assert [path for path, _ in server.asked] == ["/chat/completions", "/v1/load_lora_adapter"]


@pytest.mark.parametrize("url", ["http://ada:secret@127.0.0.1", "file:///etc/passwd", "nonsense"])
def test_the_judges_address_is_http_and_holds_no_password(url):
    with pytest.raises(ConfigError, match="OPENAI_BASE_URL='\\*\\*\\*' is not an address"):
        ask_judge(url)


@pytest.mark.parametrize(
    "words",
    [
        ["--hub_token", "secret1", "secret2"],
        ["--model_init_kwargs", '{"token": "secret1"'],
        ["--vllm_server_base_url", "http://ada:secret1@host:8000"],
    ],
)
def test_a_setting_that_is_refused_is_not_shown_where_it_may_hold_a_secret(words):
    (problem,) = recipe.read(words).problems
    assert "secret" not in str(problem)


# Each place that a token can be given in, and the token.
FAKE = {
    "HF_TOKEN": "hf_fakeEnvironmentAAAAAAAAAAAAAAAAAA",
    "WANDB_API_KEY": "fakewandb0123456789fakewandb0123456789ab",
    "VLLM_API_KEY": "vllm-fakeAAAAAAAAAAAAAAAA",
    "OPENAI_API_KEY": "sk-fakeAAAAAAAAAAAAAAAAAAAA",
}
FLAG, NESTED = (f"hf_fake{position}AAAAAAAAAAAAAAAAAAAAAA" for position in ("Flag", "Nested"))
SETTINGS = {
    "use_cpu": True,
    "bf16": False,
    "use_peft": True,
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 4,
    "num_generations": 2,
    "max_completion_length": 8,
    "max_steps": 2,
    "save_steps": 1,
    "dataset": "generated:sums",
    "eval_split": "heldout",
    "eval_n": 2,
    "log_completions": True,
    "num_completions_to_print": 0,
    "report_to": "wandb" if find_spec("wandb") else "none",  # which would write the command line down
    "model_init_kwargs": {"token": NESTED},
}


@pytest.mark.full
def test_no_token_is_in_a_run_directory_or_on_the_terminal(tiny, tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(SETTINGS))
    run = tmp_path / "run"
    command = [sys.executable, "-m", "grpo_math.cli", "train", "--config", str(tmp_path / "recipe.yaml")]
    command += ["--model_name_or_path", tiny(), "--output_dir", str(run), "--hub_token", FLAG]
    environment = {**os.environ, **FAKE, "WANDB_MODE": "offline"}
    done = subprocess.run(command, capture_output=True, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    tokens = [token.encode() for token in (*FAKE.values(), FLAG, NESTED)]
    written = [path for path in run.rglob("*") if path.is_file()]
    assert {"config.yaml", "history.jsonl", "report.html", "before.json", "adapter_model.safetensors"} <= {
        path.name for path in written
    }
    assert any(path.parent.name.startswith("checkpoint-") for path in written)
    for case, content in [("stdout", done.stdout), ("stderr", done.stderr), *((p, p.read_bytes()) for p in written)]:
        assert not [token for token in tokens if token in content], case
    assert not list(run.rglob("training_args.bin")), "a pickle of the arguments"

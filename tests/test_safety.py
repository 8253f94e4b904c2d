"""What must not happen: code of others is run, a token is written down, a key goes to another address."""

import ast
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import yaml
from launching import ROOT
from small_http import SmallHTTP, send

from grpo_math.errors import ConfigError
from grpo_math.generation.models import load_tokenizer
from grpo_math.generation.vllm_server import Server
from grpo_math.system.http import ServerError


def test_no_call_loads_code():
    """ruff refuses the rest: pickles, `eval`, shells, and connections outside `system/http.py` (pyproject.toml)."""
    names = re.compile("from_pretrained|trust_remote_code|allow_pickle|torch.load")
    for path in (ROOT / "grpo_math").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for call in ast.walk(ast.parse(text)) if names.search(text) else ():
            if isinstance(call, ast.Call):
                name, given = ast.unparse(call.func), {one.arg: ast.unparse(one.value) for one in call.keywords}
                loads = name.startswith("Auto") and name.endswith(".from_pretrained")
                # Without this argument, transformers asks on the terminal.
                assert not loads or "trust_remote_code" in given, path
                assert {given.get("trust_remote_code"), given.get("allow_pickle")} <= {None, "False"}, path
                assert name != "torch.load" or given["weights_only"] == "True", path


def test_a_model_that_comes_with_code_is_refused_and_nobody_is_asked_to_run_it(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *question: "y")
    config = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    with pytest.raises(ConfigError, match="contains custom code"):
        load_tokenizer(str(tmp_path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("status", [301, 307])
def test_no_redirect_takes_a_key_to_another_address(status, monkeypatch):
    asked = []

    def redirect(server, request):
        asked.append(request.path)
        send(request, status, headers={"Location": f"{server.url}/elsewhere"})

    monkeypatch.setattr(SmallHTTP, "handle", redirect, raising=False)
    server = SmallHTTP()
    monkeypatch.setenv("VLLM_API_KEY", "vllm-fake")
    with pytest.raises(ServerError):
        Server(server.url, retries=0).load_adapter("a", "b")
    server.stop()
    assert asked == ["/v1/load_lora_adapter"]


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
    names = {"config.yaml", "history.jsonl", "report.html", "before.json", "adapter_model.safetensors", "optimizer.pt"}
    assert names <= {path.name for path in written}
    for case, content in [("stdout", done.stdout), ("stderr", done.stderr), *((p, p.read_bytes()) for p in written)]:
        assert not [token for token in tokens if token in content], case
    assert not list(run.rglob("training_args.bin")), "a pickle of the arguments"

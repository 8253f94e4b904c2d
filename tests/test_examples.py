"""The examples run as their first lines say, with a tiny model for a step."""

import ast
import json
import os
import re
import sys
from pathlib import Path

import pytest
from hub_server import TOKENS, HubServer
from launching import ROOT, run


def test_the_script_trains_a_step_and_saves_an_adapter(tiny, tmp_path):
    options = ["--model", tiny(), "--max_steps", "1", "--output_dir", str(tmp_path / "run")]
    output = run([sys.executable, "examples/own_reward.py", *options], CUDA_VISIBLE_DEVICES="")
    assert re.search(r"rewards +reward [^\n]*(\n +[^\n]*)*concise [0-9.]+", output)
    assert (tmp_path / "run/adapter/adapter_model.safetensors").exists()


@pytest.mark.full
def test_supervised_fine_tuning_leaves_a_whole_model(tiny, tmp_path):
    row = {"prompt": [{"role": "user", "content": "1 + 1?"}], "completion": [{"role": "assistant", "content": "2"}]}
    (tmp_path / "sft.jsonl").write_text(json.dumps(row) + "\n")
    options = ["--model", tiny(), "--data", str(tmp_path / "sft.jsonl"), "--output_dir", str(tmp_path / "sft")]
    run([sys.executable, "examples/sft_warm_start.py", *options, "--max_steps", "1"], CUDA_VISIBLE_DEVICES="")
    assert (tmp_path / "sft/model.safetensors").exists()
    assert not (tmp_path / "sft/adapter_config.json").exists()


@pytest.mark.full
def test_the_notebook_runs_from_the_first_cell_to_the_last(tiny, tmp_path):
    program = tmp_path / "notebook.py"
    program.write_text(NOTEBOOK)
    words = [sys.executable, str(program), str(ROOT / "examples/sums.ipynb"), tiny()]
    shown = json.loads(run(words, cwd=tmp_path, CUDA_VISIBLE_DEVICES="").splitlines()[-1])
    assert len(shown) == 9
    assert all(0 <= float(shown[name]) <= 1 for name in ("before", "after"))
    assert re.match(r'<iframe srcdoc=.*sandbox="allow-scripts"', shown["report"], re.DOTALL)
    assert "Held-out accuracy before and after" in shown["report"]
    assert list(ast.literal_eval(shown["ask"])) == ["base", "trained"]
    assert (tmp_path / "runs/notebook/adapter/adapter_model.safetensors").exists()


# As Jupyter does: each cell in one namespace, and its last expression shown.
NOTEBOOK = """
import ast, json, sys

path, model = sys.argv[1:]
names, shown = {"__name__": "__main__"}, {}
for cell in json.load(open(path, encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        text = "".join(cell["source"])
        for old, new in (('"embedded"', repr(model)), ("max_steps=40", "max_steps=2"), ("limit=64", "limit=4")):
            text = text.replace(old, new)
        body = ast.parse(text).body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), path, "exec"), names)
        value = eval(compile(ast.Expression(last.value), path, "eval"), names) if last else None
        shown[cell["id"]] = value._repr_html_() if hasattr(value, "_repr_html_") else repr(value)
print(json.dumps(shown))
"""


@pytest.mark.full
def test_the_notebook_of_a_free_gpu_runs_from_the_first_cell_to_the_last(tmp_path, monkeypatch):
    """Each cell as it stands, but for the settings of a tiny run. Nothing is installed."""
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(json.dumps({"problem": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(16)))
    options = (
        f"--model_name_or_path embedded --chat_template_kwargs {{}} --use_cpu true --dataset {problems} --eval_n 0"
    )
    options += " --heldout_every 0 --max_steps 2 --max_completion_length 8 --num_generations 2 --save_strategy no"
    options += " --per_device_train_batch_size 2 --gradient_accumulation_steps 1 --lora_r 2"
    set_here = {'OPTIONS = ""': f"OPTIONS = {options!r}", 'REPO_ID = ""': 'REPO_ID = "ada/sums"'}
    server = HubServer()
    token = next(token for token, role in TOKENS.items() if role == "write")
    cells = json.loads((ROOT / "examples/free_gpu.ipynb").read_text(encoding="utf-8"))["cells"]
    assert len(cells) <= 12
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"HF_ENDPOINT": server.url, "HF_TOKEN": token, "HF_HUB_OFFLINE": "0", "CUDA_VISIBLE_DEVICES": ""}
    names, shown = {"__name__": "__main__"}, {}

    def command(text):
        words = ["sh", "-c", text.format(**names)]
        shown[cell["id"]] = run(words, cwd=tmp_path, PATH=path)

    names["_command"] = command
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    for cell in cells:
        text = "".join(cell["source"])
        for old, new in set_here.items():
            text = text.replace(old, new)
        if cell["id"] == "install":
            # Without a constraint, which would replace the torch of Colab or Kaggle.
            assert re.search(r'^%pip install -q "grpo_math @ \{REPOSITORY\}"$', text, re.MULTILINE)
        elif cell["cell_type"] == "code":
            text = re.sub(r"^( *)!(.*)$", lambda line: f"{line[1]}_command({line[2]!r})", text, flags=re.MULTILINE)
            exec(text, names)
    assert "ok: no error" in shown["doctor"]
    assert shown["plan"].startswith("fits: ")
    assert (tmp_path / "runs/t4_16gb/adapter/adapter_model.safetensors").exists()
    assert shown["ask"]
    assert shown["push"].startswith("pushed ")
    assert "adapter_model.safetensors" in server.repositories["ada/sums"].branches["main"]

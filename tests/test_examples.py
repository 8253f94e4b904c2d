"""The examples run as their first lines say, with a tiny model for a step."""

import ast
import json
import re
import sys

import pytest
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

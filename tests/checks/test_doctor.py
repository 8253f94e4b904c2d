"""`grpo-math doctor`: a line for each bad setting, the same in training; the shipped recipes.

The cases are in tests/cases/bad_configs.yaml.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import launching
import pytest
import yaml

from grpo_math.checks import attack
from grpo_math.checks.doctor import doctor
from grpo_math.cli import main
from grpo_math.errors import Finding
from grpo_math.problems.datasets import load_problems
from grpo_math.problems.prompts import as_template
from grpo_math.train import program

ROOT = Path(__file__).parents[2]
BASE = yaml.safe_load((ROOT / "launch/configs/demo_cpu.yaml").read_text()) | {
    "output_dir": "run",
    "per_device_train_batch_size": 64,
    "num_generations": 8,
    "max_completion_length": 8,
}
CASES = yaml.safe_load((ROOT / "tests/cases/bad_configs.yaml").read_text())
ONE_OF_EACH_CHECK = list(
    {
        case["says"].rpartition("(")[2]: case for case in [case for case in CASES if case["says"].startswith("error")]
    }.values()
)
# What a machine without a GPU, a network, an optional package or a trained demo cannot have: no fault of a recipe.
LACKING = re.compile(
    r"not installed|needs a GPU|HF_HUB_OFFLINE is set|needs the package|cannot be loaded from the Hub|did not come"
    r"|reference_model='merged/demo'"
)

REWARDS = """
def raises(completions, **columns):
    raise KeyError("x")

def one(completions, **columns):
    return [1.0]

def nan(completions, **columns):
    return [float("nan")] * len(completions)

def mapping(completions, **columns):
    return dict.fromkeys(range(len(completions)), 1.0)

def huge(completions, **columns):
    return [1e308] * len(completions)

def upside_down(completions, grade, **columns):
    return [float(g.verdict != "correct") for g in grade]
"""
FILES = {
    "file": "x",
    "folder/x": "",
    "empty.jsonl": "",
    "no_gold.jsonl": '{"problem": "1 + 1"}\n',
    "half_golds.jsonl": "".join(f'{{"problem": "p{i}", "answer": "\\\\frac{{{i}}}{{"}}\n' for i in range(20)),
    "rows.jsonl": "".join(f'{{"problem": "What is {i} + 1?", "answer": "{i + 1}"}}\n' for i in range(20)),
    # Without a formula that an answer could repeat.
    "plain.jsonl": "".join(f'{{"problem": "What comes after {i}?", "answer": "{i + 1}"}}\n' for i in range(80)),
    "stage.json": '{"zero_optimization": {"stage": "two"}}',
    "empty_model/x": "",
    "bare_model/config.json": '{"model_type": "llama"}',
    "odd_model/config.json": '{"model_type": "nosuch"}',
    "odd_model/model.safetensors": "\2\0\0\0\0\0\0\0{}",
    "earlier/history.jsonl": "{}\n",
    "odd_rewards.py": REWARDS,
    "own_prompts.py": 'def plain(problem):\n    return f"Q: {problem} Answer after ####.\\nA:"\n',
    "two.yaml": "distributed_type: FSDP\nnum_processes: 2\n",
    "three.yaml": "distributed_type: MULTI_CPU\nnum_processes: 3\n",
}


MODELS = {  # of the tiny model: a file, and what its JSON says otherwise, or the text that it becomes
    "heads_model/config.json": {"num_attention_heads": 3},
    "wide_model/config.json": {"intermediate_size": 64},
    "cut_model/model.safetensors": "version https://git-lfs.github.com/spec/v1\n",
    "chat_model/chat_template.jinja": "{% if",
}


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_rewards", raising=False)
    # A few problems show a hole: test_attack.py has the shares of all.
    monkeypatch.setattr(attack, "PROBLEMS", 4)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def models(here, tiny) -> None:
    for name, says in MODELS.items():
        file = here / name
        shutil.copytree(tiny(), file.parent)
        file.write_text(says if isinstance(says, str) else json.dumps(json.loads(file.read_text()) | says))


def recipe(folder: Path, settings: dict) -> str:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(BASE | settings))
    return str(path)


def model_of(case: dict) -> bool:
    return f"{case['set'].get('model_name_or_path')}".removeprefix("./") in {name.partition("/")[0] for name in MODELS}


LINE = re.compile(r" \(/\S+\.yaml, line \d+\)")  # of the recipe: the place of the setting


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case["what"], marks=pytest.mark.slow if model_of(case) else []) for case in CASES]
)
def test_a_bad_setting_gives_one_line(case, here, request, monkeypatch):
    if not case["says"].endswith("(attack)"):
        monkeypatch.setattr(attack, "gradable", lambda *_: [])  # without problems there is no attack: half of the time
    if model_of(case):
        request.getfixturevalue("models")
    findings = doctor(["--config", recipe(here, case["set"])], case.get("accelerate"))
    # Whether a CPU's memory is enough, is its own.
    results = [finding.line() for finding in findings if finding.level != "info" and finding.check != "memory"]
    assert [LINE.sub("", line) for line in results] == [case["says"].replace("CWD", str(here))]


@pytest.mark.slow
@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("case", ONE_OF_EACH_CHECK, ids=lambda case: case["what"])
def test_training_ends_with_the_same_line_before_it_loads_weights(case, here, capsys, monkeypatch):
    monkeypatch.setattr(program, "build_trainer", None)
    assert program.main(["--config", recipe(here, case["set"])]) == 2
    refused = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    message, _, remedy = case["says"].replace("CWD", str(here)).rpartition(". Remedy: ")
    assert [LINE.sub("", line) for line in refused] == [f"{message}: {remedy.rpartition(' (')[0]}"]
    assert not (here / "run").exists(), "a refused run leaves nothing behind"


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "launch/configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_recipe_has_no_error_but_what_this_machine_lacks(path, tmp_path, monkeypatch):
    monkeypatch.setattr(attack, "PROBLEMS", 8)  # an attack gives no error
    findings = doctor(["--config", str(path), "--output_dir", str(tmp_path / "run")])
    assert [one for one in findings if one.level == "error" and not LACKING.search(one.line())] == []


# On three processes, with a field that TRL has removed.
UNSOUND = """\
warning: max_prompt_length=9 has no effect. Remedy: no prompt is cut; grpo-math doctor names prompts that are too long \
(settings)
error: beta='-1' is out of range. Remedy: give a number of 0 or more (settings)
info: 20 problems to train on (problems)
error: prompts_per_step=8 x 8 completions = 64 rows, which 3 processes cannot share evenly. Remedy: use 9, or start 1, \
2, 4, 8, 16, 32 or 64 processes (batch)
not ok: 2 errors, 1 warning
"""
SOUND = r"""warning: lora_dropout=0.1 with beta=0.04: the KL .*\. Remedy: lora_dropout: 0.0 \(settings\)
info: 20 problems to train on \(problems\)
info: 8 prompts x 8 completions = 64 = 1 process x 64 rows x 1 step \(batch\)
info: gold answers as the grader reads them: 20 as a number \('1' = 1, '2' = 2, '3' = 3\) \(gold_answers\)
info: attacked: a blind guess gets \d+% .* \(attack\)
info: prompt tokens of 20 problems: median 51, 95% 51, longest 51 \(prompt_lengths\)
.*: memory: .* \(memory\)
ok: no error, \d warnings?
train --dry_run also loads the model and makes the trainer, then stops
"""


@pytest.mark.parametrize(
    ("words", "code", "output"),
    [
        (["--max_prompt_length", "9", "--beta=-1", "--accelerate-config", "three.yaml"], 1, re.escape(UNSOUND)),
        (["--lora_dropout", "0.1", "--beta", "0.04"], 0, SOUND),
    ],
)
def test_the_answer_is_the_same_in_json_and_in_words(words, code, output, here, capsys):
    path = recipe(here, {"dataset": "rows.jsonl", "eval_n": 0, "heldout_every": 0, "prompts_per_step": 8})
    assert main(["doctor", path, *words]) == code
    text, _ = capsys.readouterr()
    assert re.fullmatch(output, text), text
    assert main(["doctor", path, *words, "--json"]) == code
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] == (code == 0)
    assert [Finding(**finding).line() for finding in answer["findings"]] == text.splitlines()[
        : -2 if answer["ok"] else -1
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "settings", "end", "err"),
    [
        ("doctor", {"num_generations": 7}, "not ok: 1 error, no warning\n1 False\n", ""),
        (
            "train",
            {"rewards": ["odd_rewards:raises"]},
            "2 False\n",
            "error: reward function raises raised KeyError: 'x' at CWD/odd_rewards.py:3, and the data have id, "
            "problem, answer, answer_format, level: correct the function\n",
        ),
    ],
    ids=["doctor", "training"],
)
def test_a_refusal_is_all_that_is_said_and_torch_is_not_imported(command, settings, end, err, here):
    program = (
        "import sys\nfrom grpo_math.cli import main\n"
        f"code = main([{command!r}, '--config', {recipe(here, settings)!r}])\n"
        "print(code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith(end)
    assert done.stderr.startswith(err.replace("CWD", str(here)))
    assert done.stderr.count("\n") == bool(err)


@pytest.mark.parametrize(
    ("machines", "world", "processes", "started"),
    [(None, None, 3, False), (1, None, 3, False), (2, None, 3, True), (1, "3", 3, True), ("no file", "5", 5, True)],
)
def test_a_launcher_or_a_second_machine_has_started_the_processes(
    machines, world, processes, started, here, monkeypatch
):
    checked = Mock(return_value=[])
    monkeypatch.setattr("grpo_math.checks.doctor.preflight", checked)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world:
        monkeypatch.setenv("WORLD_SIZE", world)
    if isinstance(machines, int):
        with (here / "three.yaml").open("a") as file:
            file.write(f"num_machines: {machines}\n")
    list(doctor(["--config", recipe(here, {})], None if machines == "no file" else "three.yaml"))
    [setup] = checked.call_args.args
    assert (setup.processes, setup.started) == (processes, started)


@pytest.mark.slow
def test_without_a_network_each_name_is_tried_once(here):
    names = {"model_name_or_path": "nobody/model", "dataset": "nobody/data"}
    words = [sys.executable, "-m", "grpo_math.cli", "doctor", "--config", recipe(here, names)]
    # Nothing listens on port 9 of this machine.
    world = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(here / "hub")}
    done = subprocess.run(words, capture_output=True, text=True, env=world)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith(
        "info: http://127.0.0.1:9 does not answer in 5 seconds: only files in the Hub's cache "
    )
    assert [done.stdout.count(f"='{name}' is ") for name in names.values()] == [1, 1]


@pytest.mark.parametrize(
    ("template", "start"),
    [
        ("gsm8k", "<|im_start|>assistant\n"),
        pytest.param("r1_zero", "<think>", marks=pytest.mark.slow),
        pytest.param("Q: {problem}", "<|im_start|>assistant\n", marks=pytest.mark.slow),
        pytest.param("own_prompts:plain", "\nA:", marks=pytest.mark.slow),
    ],
)
def test_show_prints_the_tokens_that_are_trained_on(here, capsys, template, start):
    from grpo_math.generation.completions import token_ids
    from grpo_math.generation.models import load_tokenizer, model_path

    path = recipe(here, {"dataset": "generated:sums", "prompt_template": template})
    capsys.readouterr()  # what torch's libraries print when they are imported first
    assert main(["doctor", path, "--show", "2", "--json"]) == 0
    rows = load_problems("generated:sums", template=as_template(template), seed=0)[:2]
    expected = token_ids(load_tokenizer(model_path("embedded")), [row["prompt"] for row in rows])
    assert [one["ids"] for one in json.loads(capsys.readouterr().out)["prompts"]] == expected
    assert main(["doctor", path, "--show", "2"]) == 0
    assert capsys.readouterr().out.count(f"{start}[the completion starts here]") == 2


def test_doctor_checks_the_gpus_that_it_is_asked_for(tmp_path, monkeypatch, capsys):
    launching.nvidia_smi(tmp_path, "3, GPU-a, 24576, 0\\n5, GPU-b, 24576, 0\\n")
    monkeypatch.setattr("grpo_math.commands.doctor.doctor", lambda *arguments: [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    command = ["doctor", "--config", "gsm8k_8gb", "--accelerate_config", "zero3", "--gpus"]
    assert main([*command, "8"]) == 2
    assert capsys.readouterr().err == "error: gpus=8 cannot be had: 2 GPUs are visible here: give 1 to 2\n"
    assert main([*command, "1"]) == 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"


def test_doctor_prints_each_value_that_a_method_replaces(here, capsys):
    path = recipe(here, {"dataset": "generated:sums", "epsilon_high": 0.5})
    main(["doctor", path, "--method", "dapo", "--rewards", "gsm8k", "--json"])
    found = [(one["level"], one["message"]) for one in json.loads(capsys.readouterr().out)["findings"]]
    assert ("info", "epsilon_high 0.5 -> 0.28, by --method dapo") in found
    assert ("info", "reward_weights [1.0, 0.5] is dropped with its rewards, by the command line") in found

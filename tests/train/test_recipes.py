"""Every shipped recipe parses with the classes that will read it, fits the hardware that it names, trains, and says how
it is run. Every accelerate and DeepSpeed file is read by the loader that will read it.
"""

import json
import shlex
from types import SimpleNamespace

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from launching import ROOT
from small_runs import history
from transformers import LlamaConfig, TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig, unset_hf_deepspeed_config

from grpo_math import planner
from grpo_math.checks.training import probe
from grpo_math.cli import main as command
from grpo_math.generation.dtypes import dtype_error
from grpo_math.settings.accelerate import accelerate_config
from grpo_math.settings.recipe import read
from grpo_math.settings.rules import violations
from grpo_math.train.program import main as train
from grpo_math.trainer.recipe_settings import build

RECIPES = sorted((ROOT / "launch/configs").glob("*.yaml"))
ON_GPUS = [path for path in RECIPES if not yaml.safe_load(path.read_text()).get("use_cpu")]
# What a recipe's comment names besides: (recipe, settings after its command, GPUs, GB of one, accelerate config).
VARIANTS = [
    ("gsm8k_8gb", "--rewards shaped --output_dir runs/gsm8k_8gb_shaped", 1, 8, "single_gpu"),
    ("gsm8k_8gb", "--beta 0.01 --output_dir runs/gsm8k_8gb_kl", 1, 8, "single_gpu"),
    ("gsm8k_8gb", "--rewards shaped --beta 0.01 --output_dir runs/gsm8k_8gb_shaped_kl", 1, 8, "single_gpu"),
    (
        "r1_zero_1.5b_2gpu",
        "--vllm_mode colocate --vllm_enable_sleep_mode true --vllm_max_model_length 2048 "
        "--output_dir runs/r1_zero_1.5b_1gpu",
        1,
        40,
        "single_gpu",
    ),
]


def commands(path, program):
    """The commands of a recipe's comment that run ``program``, as words."""
    lines = [line.removeprefix("# ") for line in path.read_text().splitlines() if line.startswith("# ")]
    return [shlex.split(line) for line in lines if f"{program} " in line]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_its_command_parses_with_the_real_config_class_and_passes_its_checks(path, tmp_path):
    parsed = build(read(["--config", str(path), "--output_dir", str(tmp_path)]))
    probe(parsed.run, parsed.config)
    assert not [line for level, line in violations(parsed.recipe.settings)]
    assert parsed.model.model_name_or_path
    comment = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any(f"--config launch/configs/{path.name}" in line for line in comment[1:])


@pytest.mark.parametrize("path", ON_GPUS, ids=lambda path: path.stem)
def test_a_recipe_fits_the_hardware_that_it_names_and_divides_by_its_gpus(path, capsys, monkeypatch, tmp_path):
    """`grpo-math plan` as the comment has it says yes, and lays the GPUs out as the launch command does."""
    (words,) = commands(path, "grpo-math plan")
    monkeypatch.chdir(tmp_path)  # shipped names are found from any folder
    assert command([*words[1:], "--json"]) == 0
    layout = json.loads(capsys.readouterr().out)["layout"]
    (processes,) = (len(role["gpus"]) for role in layout if role["role"].startswith("policy"))
    (launch,) = commands(path, "accelerate launch")
    asked = launch_command_parser().parse_args(launch[launch.index("launch") + 1 :])
    assert processes == (asked.num_processes or load_config_from_file(str(ROOT / asked.config_file)).num_processes)
    assert ("--accelerate_config" in words) == ("/zero" in asked.config_file)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    build(read(["--config", str(path)]))  # refuses rows that do not divide
    # Of cards below 24 GB many are Turing, without bfloat16.
    if "--card" in words or float(words[words.index("--gpu_memory") + 1]) < 24:
        assert dtype_error(read(["--config", str(path)]).settings, 7.5) is None


@pytest.mark.parametrize(("name", "settings", "gpus", "gb", "accelerate"), VARIANTS)
def test_a_variant_is_in_the_comment_parses_and_fits(name, settings, gpus, gb, accelerate):
    path = ROOT / f"launch/configs/{name}.yaml"
    assert settings in path.read_text()
    given = read(["--config", str(path), *settings.split()]).raise_first_problem().settings
    assert planner.plan(given, {"": accelerate_config(accelerate)}, gpus=gpus, gpu_gb=gb, cpu_gb=32)["fits"]


@pytest.mark.full(keep=["gsm8k_8gb", "distill_24gb"])
@pytest.mark.parametrize("path", ON_GPUS, ids=lambda path: path.stem)
def test_a_recipe_trains_one_step_of_a_tiny_model_on_a_cpu(path, tiny, tmp_path):
    """With every other field as shipped: what a CPU, no vLLM, the tiny model or patience rule out is replaced."""
    problems = [{"problem": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(32)]
    (tmp_path / "problems.jsonl").write_text("\n".join(map(json.dumps, problems)))
    shipped = yaml.safe_load(path.read_text())
    recipe = {
        **{name: value for name, value in shipped.items() if not name.startswith("vllm_")},
        "model_name_or_path": tiny("wide" if shipped.get("load_in_4bit") else "llama"),
        "dataset": str(tmp_path / "problems.jsonl"),
        "output_dir": str(tmp_path / "run"),
        "max_steps": 1,
        "max_completion_length": 8,
        "use_cpu": True,
        "use_vllm": False,
        "generation_kwargs": None,  # in vLLM's words
        "chat_template_kwargs": {},  # the tiny model's template has no variables
        "eval_n": 0,
        "heldout_every": 0,
    }
    if "reference_model" in recipe:
        recipe["reference_model"] = str(tiny("llama"))
    if "8bit" in recipe.get("optim", ""):
        recipe["optim"] = "adamw_torch"
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert train(["--config", str(tmp_path / "recipe.yaml")]) == 0
    assert history(tmp_path / "run")[0]["step"] == 1
    assert (tmp_path / "run" / ("adapter" if recipe.get("use_peft") else "model")).is_dir()


# accelerate and DeepSpeed


@pytest.mark.parametrize("path", sorted((ROOT / "accelerate_configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_its_own_files(path):
    config = load_config_from_file(str(path))
    assert config.num_processes == yaml.safe_load(path.read_text())["num_processes"]
    if config.deepspeed_config:
        assert set(config.deepspeed_config) == {"deepspeed_config_file", "deepspeed_multinode_launcher"}
        assert (ROOT / config.deepspeed_config["deepspeed_config_file"]).is_file()


@pytest.mark.parametrize("path", sorted((ROOT / "deepspeed").glob("*.json")), ids=lambda path: path.stem)
def test_transformers_fills_in_each_auto_of_a_deepspeed_file(path, tmp_path):
    """Real runs with these files: tests/trainer/test_processes.py and tests/train/test_resume.py."""
    pytest.importorskip("deepspeed.ops")
    args = TrainingArguments(str(tmp_path), use_cpu=True, max_grad_norm=0.5, per_device_train_batch_size=3)
    filled = HfTrainerDeepSpeedConfig(str(path))
    filled.trainer_config_process(args)
    filled.trainer_config_finalize(args, SimpleNamespace(config=LlamaConfig(hidden_size=64)), 10)
    unset_hf_deepspeed_config()
    assert "auto" not in json.dumps(filled.config)
    assert (filled.get_value("gradient_clipping"), filled.get_value("train_micro_batch_size_per_gpu")) == (0.5, 3)
    zero = filled.config["zero_optimization"]
    assert (zero["overlap_comm"], zero["reduce_bucket_size"]) == (True, 64 * 64)
    assert zero.get("offload_optimizer", {}).get("pin_memory", False) == ("offload" in path.stem)

"""Whole plans: the sums agree, no GPU is used twice, suggestions save what they say, and bad input is one line."""

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import launching
import pytest
import yaml

from grpo_math.cli import main
from grpo_math.errors import ConfigError, UserError
from grpo_math.generation import dtypes, names
from grpo_math.generation.dtypes import has_bfloat16
from grpo_math.planner import choose, find_card, model, plan
from grpo_math.planner.memory_plan import MARGIN
from grpo_math.settings.accelerate import accelerate_config, shipped_configs
from grpo_math.settings.fields import fields
from grpo_math.settings.recipe import read
from grpo_math.settings.rules import violations
from grpo_math.settings.run_settings import RunSettings
from grpo_math.system.machine import GB

ROOT = Path(__file__).parents[2]
LORA = {
    "dtype": "bfloat16",
    "use_peft": True,
    "lora_target_modules": "all-linear",
    "lora_dropout": 0.0,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 8,
    "max_completion_length": 1024,
}
VLLM = {"use_vllm": True, "vllm_max_model_length": 1536}
WAYS: dict[str, dict] = {
    "transformers": {},
    "colocate": {**VLLM, "vllm_enable_sleep_mode": True},
    "server": {**VLLM, "vllm_mode": "server", "prompts_per_step": 16},
}


def planned(model: str, changes: dict, gpus: int = 1, gpu_gb: float = 24, cpu_gb: float = 256) -> dict:
    recipe = {"model_name_or_path": model, **LORA, **changes}
    if "prompts_per_step" in changes:
        del recipe["gradient_accumulation_steps"]  # solved
    return plan(RunSettings(recipe), gpus=gpus, gpu_gb=gpu_gb, cpu_gb=cpu_gb)


def printed(arguments: str) -> dict:
    """The exit code, the object and the text of `grpo-math plan --config ARGUMENTS`."""
    outputs = []
    for options in ([], ["--json"]):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            code = main(["plan", "--config", *arguments.split(), *options])
        outputs.append(output.getvalue())
    return {"code": code, "text": outputs[0].splitlines(), "answer": json.loads(outputs[1])}


@pytest.mark.parametrize(
    ("way", "gpus"), [(way, gpus) for way in WAYS for gpus in (1, 2, 8) if way != "server" or gpus > 1]
)
@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-32B"])
def test_every_plan_is_consistent_in_itself(model, gpus, way):
    fitted = []
    for size in (8, 24, 40, 80, 141):
        answer = planned(model, WAYS[way], gpus, size)
        assert set(answer["phases"]) == {"training", "generation", *(["server"] if way == "server" else [])}
        totals = {phase: sum(terms.values()) for phase, terms in answer["phases"].items()}
        assert answer["peak_gb"] == pytest.approx(max(totals["training"], totals["generation"]) / GB, abs=1e-3)
        assert sorted(gpu for role in answer["layout"] for gpu in role["gpus"]) == list(range(gpus))
        assert answer["fits"] == (not answer["problems"])
        assert not answer["fits"] or max(totals.values()) <= MARGIN * size * GB
        assert not (answer["fits"] and answer["suggestions"])
        fitted.append(answer["fits"])
    assert fitted == sorted(fitted), "more memory never makes it not fit"


CRAMPED = {
    "lora": ("Qwen/Qwen2.5-1.5B", {"max_completion_length": 2560, "gradient_accumulation_steps": 2}, 1, 8),
    "dropout": ("Qwen/Qwen2.5-1.5B", {"lora_dropout": 0.05, "max_completion_length": 256}, 1, 6),
    "lora without checkpointing": ("Qwen/Qwen2.5-1.5B", {"gradient_checkpointing": False}, 1, 24),
    "long completions": ("Qwen/Qwen2.5-7B", {"max_completion_length": 8192}, 1, 40),
    "float32": ("Qwen/Qwen2.5-7B", {"dtype": "float32"}, 1, 24),
    "full": ("Qwen/Qwen2.5-1.5B", {"use_peft": False, "dtype": "float32"}, 2, 24),
    "vllm awake": ("Qwen/Qwen2.5-7B", {"use_vllm": True, "vllm_gpu_memory_utilization": 0.6}, 1, 40),
    "vllm, context of the model": ("Qwen/Qwen2.5-7B", {"use_vllm": True, "vllm_enable_sleep_mode": True}, 1, 40),
    "too large": ("Qwen/Qwen2.5-7B", {}, 1, 12),
}


@pytest.mark.parametrize(("model", "changes", "gpus", "size"), CRAMPED.values(), ids=CRAMPED)
def test_each_suggestion_saves_what_it_says(model, changes, gpus, size):
    before = planned(model, changes, gpus, size)
    assert not before["fits"]
    assert before["suggestions"]
    for suggestion in before["suggestions"]:
        assert set(suggestion["change"]) <= fields().keys()
        assert yaml.safe_load("\n".join(suggestion["set"])) == suggestion["change"]
        changes = {**changes, **suggestion["change"]}
        after = planned(model, changes, gpus, size)
        assert before["peak_gb"] - after["peak_gb"] == pytest.approx(suggestion["saves_gb"], abs=2e-3)
        assert after["fits"] == suggestion["fits"]
        before = after
    assert after["fits"]


PASTED = [  # the card, and fields next to those of gsm8k_8gb
    ("8", "--model_name_or_path Qwen/Qwen2.5-7B"),
    ("8", "--model_name_or_path Qwen/Qwen3-4B --use_vllm --load_in_4bit true --max_completion_length 2048"),
    ("12", "--model_name_or_path Qwen/Qwen3-4B --use_vllm"),
    ("12", "--model_name_or_path meta-llama/Llama-3.1-8B --dtype auto"),
    ("12", "--model_name_or_path Qwen/Qwen2.5-7B --load_in_4bit true --max_completion_length 4096"),
    ("t4", "--model_name_or_path Qwen/Qwen3-1.7B --dtype bfloat16"),
    ("12", "--model_name_or_path Qwen/Qwen3-8B --use_vllm --max_completion_length 4096"),  # one copy, in 4 bit
    ("16", "--model_name_or_path Qwen/Qwen2.5-7B --use_vllm --max_completion_length 2048"),
    ("24", "--model_name_or_path Qwen/Qwen2.5-7B --use_vllm --vllm_share_weights --dtype float32"),
    ("24", "--model_name_or_path Qwen/Qwen2.5-7B --use_vllm --cast_lm_head_to_fp32"),
    # The model has 8,192 positions.
    ("24", "--model_name_or_path HuggingFaceTB/SmolLM2-1.7B --use_vllm --max_completion_length 8192"),
    ("48", "--model_name_or_path Qwen/Qwen2.5-32B --max_completion_length 8192 --entropy_coef 0.1"),
]


@pytest.mark.parametrize(("card", "more"), PASTED)
def test_the_line_to_paste_fits_and_each_of_its_changes_is_needed(card, more, capsys):
    options = ["--card", card] if card == "t4" else ["--gpu_memory", card]
    before = ["gsm8k_8gb", *more.split(), "--gpus", "1"]

    def answer(words):
        code = main(["plan", "--json", "--config", *words, *options, "--cpu_memory", "32"])
        out, err = capsys.readouterr()
        assert "measuring" not in err, "all of it is shipped"
        return code, json.loads(out)

    code, first = answer(before)
    assert code == 1
    code, after = answer(first["command"].split()[3:])
    assert (code, after["peak_gb"]) == (0, first["best"]["peak_gb"])
    config = accelerate_config(first["best"]["accelerate_config"] or "single_gpu")
    changes = [suggestion["change"] for suggestion in first["suggestions"]]
    machine = {"gpus": 1, "gpu_gb": 15, "capability": 7.5} if card == "t4" else {"gpus": 1, "gpu_gb": float(card)}
    together = {name: value for change in changes for name, value in change.items()}
    recipe = read(["--config", *before[:-2]]).settings
    refused = {error.field for level, error in violations(recipe.changed(**together)) if level == "error"}
    assert not refused & together.keys()
    # The number of accumulated micro-batches only keeps the number of prompts.
    for left_out in together.keys() - {"gradient_accumulation_steps"}:
        rest = {name: value for name, value in together.items() if name != left_out}
        without = choose(recipe.changed(**rest), {"": config}, cpu_gb=32, **machine)[1]
        # Training refuses one copy in 4 bit without nested constants.
        assert not without.fits or without.refused - refused, left_out


@pytest.mark.parametrize(
    ("name", "gb", "bfloat16"),
    [
        *((name, 8, True) for name in ("RTX 4060 Ti 8GB", "5060", "5060ti-8")),
        *((name, 12, True) for name in ("GeForce RTX 3060", "4070", "5070")),
        *((name, 16, True) for name in ("4080", "4060 Ti 16GB", "5080")),
        *((name, 45, True) for name in ("A40", "L40S")),
        *((name, 16, False) for name in ("Tesla V100-16GB", "P100")),
        *[
            ("3080 10GB", 10, True),
            ("NVIDIA A100-SXM4-80GB", 80, True),
            ("A10G", 22.5, True),
            ("5090", 32, True),
            ("RTX 6000 Ada Generation", 48, True),
        ],
        *[("T4", 15, False), ("Quadro RTX 6000", 24, False), ("RTX A6000", 48, True)],
    ],
)
def test_a_card_has_the_memory_and_the_number_formats_that_it_reports(name, gb, bfloat16):
    card = find_card(name)
    assert card.gb == pytest.approx(gb, abs=0.2)
    assert has_bfloat16(card.capability) == bfloat16


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("A100", "is sold with 40 and with 80 GB: name a100-40 or a100-80"),
        ("RTX 4060 Ti", "is sold with 8 and with 16 GB: name 4060ti-8 or 4060ti-16"),
        ("RTX 4090 Laptop GPU", "is a laptop's GPU"),
        ("Radeon RX 7900 XTX", "was never tried with torch's build for ROCm: give --gpu_memory GB instead"),
        ("MI300X", "is an AMD GPU"),
        ("Apple M3 Max", "was never tried: train on the CPU there: plan with --use_cpu true --cpu_memory GB"),
        ("Quadro", "is not in the list of cards: give --gpu_memory GB instead; --card list prints the cards"),
        ("3070", "is not in the list of cards: give --gpu_memory GB instead; --card list prints the cards"),
        ("80,989,3350", "is not in the list of cards"),
    ],
)
def test_a_card_that_is_not_one_gets_a_sentence(name, line):
    with pytest.raises(ConfigError, match=re.escape(line)):
        find_card(name)


def test_one_copy_of_the_base_is_proposed_and_counted_once():
    shared = {**WAYS["colocate"], "vllm_share_weights": True}
    two, one = planned("Qwen/Qwen2.5-1.5B", WAYS["colocate"]), planned("Qwen/Qwen2.5-1.5B", shared)
    # In generation the base is in vLLM's share, and in the update nothing else of a sleeping vLLM is there.
    assert "base_weights" not in one["phases"]["generation"]
    assert one["phases"]["training"]["base_weights"] == one["phases"]["generation"]["vLLM_weights"]
    assert "vLLM_KV_cache" not in one["phases"]["training"]
    # The weights of an engine that sleeps by itself are in main memory.
    assert two["main_memory"]["vLLM_weights"] == two["phases"]["generation"]["vLLM_weights"]
    assert "vLLM_weights" not in one["main_memory"]
    awake = planned("Qwen/Qwen2.5-1.5B", {**shared, "vllm_enable_sleep_mode": False})
    assert "base_weights" not in awake["phases"]["training"]
    (first, *_) = planned("Qwen/Qwen2.5-1.5B", WAYS["colocate"], gpu_gb=8)["suggestions"]
    assert first["change"] == {"vllm_share_weights": True}


def test_on_a_gpu_that_overflows_every_number_format_is_named(monkeypatch):
    monkeypatch.setitem(names.OVERFLOWING, "qwen2", "https://report")
    recipe = RunSettings({"model_name_or_path": "Qwen/Qwen2.5-1.5B", **LORA})
    machine = {"gpus": 1, "gpu_gb": 15, "cpu_gb": 64, "capability": 7.5}
    [suggestion] = plan(recipe, **machine)["suggestions"]
    assert suggestion["change"] == dtypes.FLOAT32
    # The last of these is what training would choose by itself.
    assert plan(recipe.changed(**dtypes.FLOAT32), **machine)["fits"]
    assert not plan(recipe.changed(dtype="float32", fp16=False), **machine)["fits"]


def test_gpus_share_an_engine_before_another_method_is_proposed():
    fields = {"model_name_or_path": "Qwen/Qwen2.5-32B", "dtype": "bfloat16", **WAYS["colocate"], "prompts_per_step": 16}
    recipe = RunSettings(fields)
    answer = plan(recipe, shipped_configs(recipe), gpus=8, gpu_gb=80, cpu_gb=1000)
    changes = {name: value for suggestion in answer["suggestions"] for name, value in suggestion["change"].items()}
    assert changes["vllm_tensor_parallel_size"] in (2, 4, 8)
    assert not {"use_peft", "use_vllm"} & changes.keys()
    assert plan(
        recipe.changed(**changes), {"": accelerate_config(answer["best"]["accelerate_config"])}, gpus=8, gpu_gb=80
    )["fits"]


def test_a_recipe_that_cannot_fit_says_what_is_missing_with_all_changes():
    answer = planned("Qwen/Qwen2.5-32B", {}, 1, 8)
    assert (answer["suggestions"], answer["best"]) == ([], None)
    assert "training needs" in answer["lacking"][0]


def test_dropout_with_stacked_experts_is_one_line():
    answer = {"error": "ValueError: lora.ParamWrapper does not work with lora_dropout != 0."}
    with pytest.raises(UserError, match="stacked experts of mine: set it to"):
        model.measured("mine", {"model_type": "mixtral"}, {"lora": {"lora_dropout": 0.1}}, lambda *_: answer)


# The command


def recipe(folder: Path, **fields) -> str:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"model_name_or_path": "Qwen/Qwen2.5-1.5B", **LORA, **fields}))
    return str(path)


ONE = ["--gpus", "1", "--gpu-memory"]
FOUR = ["--gpus", "4", "--gpu-memory", "80", "--prompts_per_step", "16"]


@pytest.mark.parametrize(
    ("fields", "options", "named"),
    [
        ({}, [], "gpus=None"),
        ({}, ["--gpus", "1"], "gpu_memory=None"),
        ({}, [*ONE, "-3"], "gpu_memory=-3.0"),
        ({}, [*ONE, "24", "--prompt-tokens", "0"], "prompt_tokens=0"),
        ({}, [*ONE, "much"], "gpu_memory"),
        ({}, [*ONE, "24", "--accelerate-config", "nowhere.yaml"], "nowhere.yaml"),
        ({"model_name_or_path": None}, [*ONE, "24"], "model_name_or_path=None"),
        ({"model_name_or_path": "no/such-model"}, [*ONE, "24"], "no/such-model"),
        ({"deepspeed": "nowhere.json"}, [*ONE, "24"], "nowhere.json cannot be read"),
        ({"dtype": "bf16"}, [*ONE, "24"], "dtype='bf16'"),
        ({"optim": "lomo"}, [*ONE, "24"], "optim='lomo'"),
        ({"use_peft": False, "load_in_4bit": True}, [*ONE, "24"], "load_in_4bit=True"),
        ({"load_in_4bit": True}, [*ONE, "24", "--accelerate-config", "zero3"], "load_in_4bit=True under ZeRO-3"),
        ({"fsdp": "full_shard"}, [*ONE, "24"], "fsdp='full_shard'"),
        ({"attn_implementation": "eager"}, [*ONE, "24"], "attn_implementation='eager'"),
        ({"pack_updates": False}, [*ONE, "24"], "pack_updates=False"),
        ({}, [*ONE, "24", "--card", "h1"], "card='h1'"),
        ({}, [*ONE, "24", "--card", "0,65,320"], "card='0,65,320'"),
        (WAYS["server"], [*ONE, "24"], "needs 1 separate GPU"),
        (WAYS["server"] | {"vllm_tensor_parallel_size": 5}, FOUR, "vllm_tensor_parallel_size"),  # of 12 heads
        (WAYS["server"] | {"vllm_tensor_parallel_size": 6}, FOUR, "vllm_tensor_parallel_size"),  # on 4 GPUs
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(fields, options, named, tmp_path, capsys, monkeypatch):
    launching.nvidia_smi(tmp_path, "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["plan", "--config", recipe(tmp_path, **fields), *options]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert named in err


def test_the_gpus_of_this_machine_are_the_default_and_a_field_without_effect_is_named(tmp_path, capsys):
    launching.nvidia_smi(tmp_path, "0, GPU-a, 24576, 0\\n1, GPU-b, 24576, 0\\n")
    assert main(["plan", "--config", recipe(tmp_path), "--json", "--max_prompt_length", "512"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["layout"][0]["gpus"] == [0, 1]
    assert err.startswith("warning: max_prompt_length=512 has no effect: ")


@pytest.mark.parametrize(
    ("arguments", "command", "roles"),
    [
        (
            "r1_zero_7b_4gpu --nodes 1 --gpus 8",
            "VLLM_GPUS=4 sbatch --gpus-per-node=8 FOLDER/one_node.sbatch RECIPE accelerate_configs/zero2.yaml",
            {"vLLM server, tensor parallel 4": 4, "policy": 4},
        ),
        # The last node runs the server.
        (
            "r1_zero_7b_4gpu --nodes 3 --gpus 8 --seed 1",
            "sbatch --nodes=3 --gpus-per-node=8 FOLDER/multi_node.sbatch RECIPE accelerate_configs/zero2.yaml --seed 1",
            {"policy": 16, "vLLM server, tensor parallel 4": 4, "idle": 4},
        ),
        (
            "gsm8k_8gb --nodes 2 --gpus 4",
            "sbatch --nodes=2 --gpus-per-node=4 FOLDER/multi_node.sbatch RECIPE accelerate_configs/multi_node.yaml",
            {"policy, and generation by transformers": 8},
        ),
    ],
)
def test_a_plan_of_nodes_prints_the_line_that_submits_the_job(arguments, command, roles, monkeypatch):
    monkeypatch.chdir(ROOT)
    answer = printed(f"{arguments} --gpu_memory 80 --cpu_memory 512")["answer"]
    assert answer["fits"]
    assert answer["command"] == command.replace("RECIPE", arguments.split()[0]).replace("FOLDER", "launch/slurm")
    assert {role["role"]: len(role["gpus"]) for role in answer["layout"]} == roles
    assert sorted(gpu for role in answer["layout"] for gpu in role["gpus"]) == list(range(sum(roles.values())))


def test_the_first_lines_name_the_fullest_gpu_of_the_job_and_the_idle_ones():
    """With the setting that uses them; the second case is a node of which the server uses a half."""
    for arguments, idle in (
        ("--gpus 7", "idle: GPU 6; prompts_per_step: 18 would use every GPU"),
        (
            "--nodes 2 --gpus 8",
            "idle: GPU 12, 13, 14, 15; vllm_mode: colocate, vllm_enable_sleep_mode: true would use every GPU",
        ),
        ("--gpus 6", "GPU 0, 1: vLLM server, tensor parallel 2"),
    ):
        one = printed(f"r1_zero_7b_4gpu {arguments} --card h100 --cpu_memory 512")
        first, second, *_ = [line for line in one["text"] if line[:2] != "  " and not line.startswith("main memory")]
        assert first == "fits: 71.6 of 79.6 GB at the peak, on a GPU of the server; largest: vLLM KV cache"
        assert second == idle


def test_a_step_that_grows_with_the_gpus_says_so_and_a_plan_that_fits_has_its_line_to_paste():
    alone, several = (printed(f"gsm8k_8gb --gpus {n} --gpu_memory 24 --seed 3") for n in (1, 8))
    assert "in one line: grpo-math train --config gsm8k_8gb --seed 3 --gpus 1" in alone["text"]
    grows = "the step grows with the processes: 64 prompts in place of 8; prompts_per_step: 8 keeps it"
    assert (grows in several["text"], grows in alone["text"]) == (True, False)
    assert printed("gsm8k_8gb --gpus 8 --gpu_memory 24 --prompts_per_step 8")["answer"]["notes"] == []


def test_without_a_network_the_hub_is_asked_once_and_the_models_that_need_none_are_listed(
    tmp_path, capsys, monkeypatch
):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", Mock(side_effect=OSError("offline")))
    words, lines = ["--config", recipe(tmp_path, model_name_or_path="no/such")], []
    for command in (
        ["plan", *words, *ONE, "24"],
        ["train", *words, "--use_cpu", "true", "--output_dir", str(tmp_path / "run")],
    ):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        assert main(command) == 2
        lines.append(capsys.readouterr().err.splitlines())
    assert lines[0] == lines[1]
    note, error = lines[0]
    assert note.endswith("does not answer in 5 seconds: only files in the Hub's cache are read")
    assert error.endswith("needs only a folder with config.json, and nothing for the models of plan --list_models")
    assert main(["plan", "--list_models"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert {"Qwen/Qwen2.5-1.5B", "google/gemma-3-12b", "Qwen/Qwen3-30B-A3B"} <= {*listed}


def test_the_cards_are_listed_with_their_memory(capsys):
    assert main(["plan", "--card", "list"]) == 0
    assert {"h200            140.4 GB", "3060               12 GB"} <= {*capsys.readouterr().out.splitlines()}


def test_a_plan_needs_neither_network_nor_torch():
    program = (
        "import socket, sys\n"
        "socket.socket.connect = None\n"
        "from grpo_math.cli import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "assert not {'torch', 'transformers', 'trl', 'huggingface_hub'} & set(sys.modules)\n"
    )
    command = ["plan", "--config", "launch/configs/iterative_7b_8gpu.yaml", "--gpus", "8", "--gpu-memory", "80"]
    subprocess.run([sys.executable, "-c", program, *command], cwd=ROOT, check=True)

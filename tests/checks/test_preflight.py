"""The checks before a run, each on what it is for: a machine, a tokenizer or a server that is not this one."""

import json
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace

import launching
import pytest
import yaml
from small_http import AnsweringHTTP

from grpo_math.checks import check_machine, check_services
from grpo_math.checks.check_rewards import summed
from grpo_math.checks.preflight import CHECKS, preflight
from grpo_math.checks.setup import Setup
from grpo_math.run.resume import explicit_settings
from grpo_math.settings.recipe import read
from grpo_math.system import gpus
from grpo_math.system.gpus import Gpu

ARGV = [
    *("--model_name_or_path", "embedded", "--dataset", "generated:sums", "--use_cpu", "--output_dir", "run"),
    *("--prompt_template", "{problem}"),
]
GPU = ["--use_cpu", "false"]
ADAPTER = ["--use_peft", "--dtype", "float32"]
ROWS = ["--dataset", "mine.jsonl", "--eval_n", "0"]
SERVER = ["--use_vllm", "--vllm_mode", "server"]
ON_POLICY = "info: each rollout serves one update: the ratio is 1, and all shipped surrogates have one gradient"
VERSION = {"/version": '{"version": "0.31.0+cpu"}', "/health": ""}
# Rendered, a prompt of n words has n + 3 tokens, which are words: two roles and the end of a turn.
CHAT = """\
{% for m in messages %}{{ m.role }} {{ m.content }} <end> {% endfor %}{{ mood }}
{% if add_generation_prompt %}assistant {% endif %}"""


def setup(*words: str, **more) -> Setup:
    results = read([*ARGV, *words])
    assert results.problems == []
    return Setup(results, **more)


def named(name: str) -> list:
    return [check for check in CHECKS if check.name == name][:1]


def tokenizer_of_words(folder: Path, eos: str = "<end>", template: str | None = CHAT):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "<end>": 1, "<stop>": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": eos, "additional_special_tokens": ["<end>", "<stop>"]}
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template, name_or_path=str(folder), **special)


def run_of(**before) -> dict[str, str]:
    """Return the files of a run of these settings, with a checkpoint of step 12."""
    return {
        "run/config.yaml": yaml.safe_dump({"stated": explicit_settings(setup().settings) | before}),
        "run/checkpoint-12/trainer_state.json": '{"global_step": 12}',
    }


def rows_of(*pairs: tuple[str, str]) -> dict[str, str]:
    return {"mine.jsonl": "".join(json.dumps({"problem": p, "answer": a}) + "\n" for p, a in pairs)}


def golds(bad: int) -> dict[str, str]:
    """Return 100 problems, of which ``bad`` have half a gold answer."""
    return rows_of(*((f"p{i}", "\\frac{1}{" if i < bad else str(i)) for i in range(100)))


def of_golds(level: str, bad: int) -> str:
    message = f"{bad} of 100 gold answers are not correct when graded against themselves; the first is mine/1"
    verdict = r"'\\frac{1}{': '\\frac{1}{' is unparseable"
    return f"{level}: {message}, {verdict}. Remedy: correct these answers, or leave the rows out"


WORDS = rows_of(*((" ".join(["x"] * n), "1") for n in range(20, 0, -1)))
SUMS = rows_of(*((f"Add {n} and 1,000.", str(n + 1000)) for n in range(100)))
SUMS_FILE = ["--dataset", "mine.jsonl", "--heldout_every", "1"]
LENGTHS = "info: prompt tokens of 20 problems: median 14, 95% 23, longest 23"
OVER = (
    "error: {} of 20 prompts and max_completion_length={} come to more than {} (the longest prompt has 23 tokens). "
    "Remedy: shorten max_completion_length, or leave out long problems"
)
HALVES = [("What is half of 1?", "1/2"), ("What is half of 1?", "0.5"), ("3 + 4?", "7"), ("3 + 4?", "8")]
OLD = "needs a GPU of compute capability 8.0 or more, and this one has"
LOCK = ".cache/torch_extensions/py311_cpu/cpu_adam/lock"
LAUNCHER = "needs processes that a launcher has started. Remedy: add --accelerate_config, or leave it out"
UNKNOWN = "info: model_name_or_path='.' has not been measured. Remedy: grpo-math plan measures it once"
NEEDS_GPU = "warning: vllm_mode='server' needs 1 separate GPU, and 1 is visible. Remedy: set vllm_mode to colocate"
HEADS = "error: vllm_tensor_parallel_size=8 does not suit 9 heads and 8 GPUs for the server. Remedy: leave it out"
OFFLOAD = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"offload_optimizer_device": "cpu"}}
DISK = "error: what the run saves needs N GB, and <HERE> has N GB free. Remedy: name another output_dir"
PHI = {"config.json": '{"model_type": "phi3"}'}
ADA = '{"name": "ada", "orgs": [{"name": "lovelace"}], "auth": {"accessToken": {"role": "write"}}}'
NAME = "is not a name for a model repository. Remedy: give user/name, of letters, digits, '-', '_' and '.', at most 96"
HUB = {"HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_secret", "HF_ENDPOINT": "<URL>"}
NETRC = "machine 127.0.0.1 login me password secret"
WANDB = ["--report_to", "wandb"]
SYNC = "Remedy: wandb sync uploads the run later"
REWARDS = {
    "tried.py": """
class Later:
    async def __call__(self, completions, grade, trainer_state, **columns):
        return [float(g.verdict == "correct") for g in grade]

later = Later()

def short(prompts, completion_ids, max_completion_length, log_metric, grade_timeout, **columns):
    return [len(ids) / max_completion_length for ids in completion_ids]

def first(completions, grade, **columns):
    return [None if i else float(g.verdict == "correct") for i, g in enumerate(grade)]

def worse_once(completions, grade, **columns):
    return [float(g.verdict != "correct") if i % 8 else 0.5 for i, g in enumerate(grade)]

def verified(completions, answer, **columns):
    from math_verify import parse, verify

    return [float(verify(parse(a, parsing_timeout=3), parse(c[-1]["content"]))) for c, a in zip(completions, answer)]
"""
}
NOT_MORE = "do not reward correct answers more than wrong ones, such as 'It follows: \\\\boxed{20}.' and 'It follows: "
BOXED = ["--prompt_template", "boxed", "--rewards"]
INSTALL = 'in a new environment, pip install -c constraints-vllm.txt -e ".[vllm]"'
QLORA = ["--use_vllm", "--vllm_mode", "colocate", "--load_in_4bit", "--use_peft"]
# check -> (words of the command line, what the world is like, the starts of the lines)
CASES: dict[str, list[tuple[list[str], dict, list[str]]]] = {
    "versions": [
        ([], {"versions": {"trl": "1.15.0"}}, ["error: trl 1.15.0 is not a version that this works with ("]),
        ([], {"versions": {"trl": "1.16.9"}}, []),
        ([], {"versions": {"trl": "1.16.1rc1"}}, []),
        (
            [],
            {"versions": {"transformers": "5.16.0", "peft": "0.19.1", "torch": "2.13.0+cpu"}},
            [
                "warning: transformers 5.16.0 is not a version that this works with (",
                "warning: peft 0.19.1 is not a version that this works with (",
            ],
        ),
        (["--load_in_4bit"], {"versions": {"bitsandbytes": "0.1"}}, ["error: bitsandbytes 0.1 is not"]),
        (["--optim", "adamw_8bit"], {"versions": {"bitsandbytes": "0.1"}}, ["error: bitsandbytes 0.1 is not"]),
        (["--deepspeed", "zero2.json"], {"versions": {"deepspeed": "0.1"}}, ["error: deepspeed 0.1 is not"]),
        (
            [],
            {"versions": {"deepspeed": "0.1"}, "accelerate": {"distributed_type": "DEEPSPEED"}},
            ["error: deepspeed 0.1 is not"],
        ),
        (
            ["--use_vllm", "--vllm_mode", "colocate"],
            {"versions": {}},
            [f"error: use_vllm needs vllm, which is not installed. Remedy: {INSTALL} (versions)"],
        ),
        (
            [*GPU, "--use_vllm", "--vllm_mode", "colocate"],
            {"versions": {}, "gpu": [Gpu(0, 24.0, ""), Gpu(1, 24.0, "")]},
            [f"error: use_vllm needs vllm, which is not installed. Remedy: {INSTALL}, or set vllm_mode: server"],
        ),
        # A recipe like long_context_8b_qlora.
        (QLORA, {"versions": {"bitsandbytes": "0.50.2", "vllm": "0.27.1"}}, []),
        (QLORA, {"versions": {"bitsandbytes": "0.50.2", "vllm": "0.28.0", "vllm-bnb-plugin": "0.0.3"}}, []),
        (
            QLORA,
            {"versions": {"bitsandbytes": "0.50.2", "vllm": "0.31.0"}},
            [
                "error: load_in_4bit with vLLM 0.28 or newer needs vllm-bnb-plugin, which is not installed. Remedy: "
                'pip install vllm-bnb-plugin, or pip install "vllm<0.28"'
            ],
        ),
        (
            ["--load_in_4bit"],
            {"versions": {}},
            [
                "error: a model or an optimizer in 4 or 8 bit needs bitsandbytes, which is not installed. Remedy: pip "
                'install "bitsandbytes>=0.49" (versions)'
            ],
        ),
        ([*SERVER, *ADAPTER], {"versions": {}}, []),
        (
            SERVER,
            {"versions": {}, "gpu": [Gpu(0, 24.0, ""), Gpu(1, 24.0, "")]},
            [f"error: sending all weights to a vLLM server needs vllm, which is not installed. Remedy: {INSTALL}"],
        ),
        (
            [*SERVER, *ADAPTER, "--vllm_sync", "merged", "--load_in_4bit"],
            {"versions": {"vllm": "0.32.0", "bitsandbytes": "0.50.2"}},
            ["error: vllm 0.32.0 is not a version that this works with (<0.32,>=0.22). Remedy: in a new environment"],
        ),
        (
            ["--use_liger_kernel"],
            {"versions": {}},
            ["error: use_liger_kernel needs liger_kernel, which is not installed"],
        ),
    ],
    "gpus": [
        (
            GPU,
            {"gpus": []},
            ["info: there is no GPU here, so this runs on the CPU. Remedy: set use_cpu: true, if that"],
        ),
        (GPU, {"gpus": [8.0], "env": {"CUDA_VISIBLE_DEVICES": ""}}, ["info: there is no GPU here"]),
        (GPU, {"gpus": [8.0], "env": {"CUDA_VISIBLE_DEVICES": "0"}}, []),
        (GPU, {"gpus": ["[N/A]"]}, []),
        (
            GPU,
            {"gpus": ["8.0, 580.65.06, Enabled, A100"]},
            [
                "warning: GPU 0 is in MIG mode, and nvidia-smi -L lists no slice of it. Rem",
                "info: there is no GPU here",
            ],
        ),
        (
            GPU,
            {"gpus": ["6.1", "8.9"]},
            ["warning: torch for CUDA 13.0 has no kernels for GPU 0 (NVIDIA RTX, 6.1): only"],
        ),
        (
            GPU,
            {"gpus": [8.0], "unusable": ("torch 2.13.0 for CUDA 13.0 needs driver 580", "update the driver")},
            [
                "error: use_cpu=False needs a GPU that torch can use: torch 2.13.0 for CUDA 13.0 needs driver 580. "
                "Remedy: update the driver, or set use_cpu: true"
            ],
        ),
        ([], {"gpus": [6.1], "unusable": ("old", "")}, []),  # on the CPU
        (GPU, {"gpus": [8.0], "unusable": ("old", ""), "accelerate": {"use_cpu": True}}, []),
        (GPU, {"gpus": [8.0], "unusable": ("old", ""), "env": {"ACCELERATE_USE_CPU": "true"}}, []),
    ],
    "number_format": [
        ([*GPU, "--bf16", "true"], {"gpus": [7.5]}, [f"error: bf16=True {OLD} 7.5. Remedy: set bf16: false, fp16"]),
        ([*GPU, "--dtype", "bfloat16"], {"gpus": [9.0, 7.5]}, [f"error: dtype='bfloat16' {OLD} 7.5. Remedy: set dty"]),
        ([*GPU, "--dtype", "float32"], {"gpus": [7.5]}, []),
        (["--bf16", "true"], {"gpus": [7.5]}, []),  # on the CPU
        (GPU, {"gpus": ["[N/A]"]}, []),
        (
            [*GPU, "--dtype", "auto", "--use_peft", "--attn_implementation", "eager", "--model_name_or_path", "."],
            {"gpus": [7.5], "files": {"config.json": '{"model_type": "qwen2"}'}},
            [
                "error: attn_implementation='eager' computes qwen2 in float16, in which its activations overflow (https://"
            ],
        ),
        ([*GPU, "--bf16", "true"], {"gpus": [7.5, 8.0], "env": {"CUDA_VISIBLE_DEVICES": "1"}}, []),
        ([*GPU, "--bf16", "true"], {"gpus": [8.0]}, []),
        (
            [*GPU, "--dtype", "bfloat16"],
            {"gpus": [8.0]},
            ["warning: dtype=bfloat16: AdamW's small steps are rounded away in weights that have no float32 copy. Re"],
        ),
        ([*GPU, "--dtype", "bfloat16", "--use_peft"], {"gpus": [8.0]}, []),
        ([*GPU, "--dtype", "bfloat16", "--deepspeed", "zero2.json"], {"gpus": [8.0]}, []),
        ([*GPU, "--dtype", "bfloat16"], {"gpus": [8.0], "accelerate": {"distributed_type": "FSDP"}}, []),
        ([*GPU, "--dtype", "bfloat16"], {"gpus": [8.0], "env": {"ACCELERATE_USE_FSDP": "true"}}, []),
        (GPU, {"gpus": [8.0], "accelerate": {"mixed_precision": "fp16"}}, []),
        ([*GPU, "--dtype", "auto"], {"gpus": [7.5]}, []),
        (
            [*GPU, "--dtype", "auto", "--use_peft", "--model_name_or_path", "."],
            {"gpus": [7.5], "files": {"config.json": '{"model_type": "gemma3_text"}'}},
            ["error: dtype='auto' computes gemma3_text in float16, in which its activations overflow (https://github"],
        ),
        ([*GPU, "--model_name_or_path", "google/gemma-3-1b-it"], {"gpus": [8.0]}, []),
        (
            [*GPU, "--attn_implementation", "flash_attention_2"],
            {"gpus": [8.0]},
            [
                "error: attn_implementation='flash_attention_2' needs flash_attn. Remedy: use sdpa, or install it, or "
                "kernels"
            ],
        ),
        ([*GPU, "--attn_implementation", "kernels-community/flash-attn"], {"gpus": [8.0]}, []),
    ],
    "deepspeed": [
        (["--fsdp", "full_shard"], {"gpus": []}, [f"error: fsdp='full_shard' {LAUNCHER}"]),
        (
            ["--deepspeed", "deepspeed/zero2.json"],
            {"gpus": [8.0]},
            [f"error: deepspeed='deepspeed/zero2.json' {LAUNCHER}"],
        ),
        (["--fsdp", "full_shard"], {"gpus": [8.0, 8.0]}, []),
        (["--fsdp", "full_shard"], {"gpus": [], "launched": 2}, []),
        (["--fsdp", "full_shard"], {"gpus": [], "accelerate": {"num_processes": 1}}, []),
        (["--fsdp", "full_shard"], {"gpus": [], "env": {"RANK": "0"}}, []),
    ],
    "compilers": [
        (GPU, {"gpus": [8.0]}, []),
        (["--use_cpu"], {"gpus": [8.0], "env": {"CC": "/nowhere/cc"}}, []),
        (GPU, {"gpus": [], "env": {"CC": "/nowhere/cc"}}, []),
        (
            GPU,
            {"gpus": [8.0], "env": {"CC": "/nowhere/cc"}},
            ["error: training on a GPU needs a C compiler, with which Triton compiles code at the first use. Remedy"],
        ),
        (
            GPU,
            {"gpus": [8.0], "include": "/nowhere"},
            ["error: training on a GPU needs Python.h, with which Triton compiles code"],
        ),
        ([*GPU, "--deepspeed", "deepspeed/zero2.json"], {"gpus": [8.0], "env": {"CXX": "/nowhere/c++"}}, []),
        *(
            (
                [*GPU, *words],
                {"gpus": [8.0], "env": {"CXX": "/nowhere/c++"}, "accelerate": accelerate},
                ["error: training on a GPU needs a C++ compiler, with which Triton and DeepSpeed compile code"],
            )
            for words, accelerate in ((["--deepspeed", "deepspeed/zero2_offload.json"], {}), ([], OFFLOAD))
        ),
    ],
    "compilation": [
        (
            ["--deepspeed", "deepspeed/zero2_offload.json"],
            {"env": {"XDG_CACHE_HOME": ""}, "files": {LOCK: ""}, "old": {LOCK: 11}},
            [f"warning: <HERE>/{LOCK} is 11 minutes old: DeepSpeed waits until it is gone. Remedy: rm <HERE>/{LOCK}"],
        ),
        (["--deepspeed", "deepspeed/zero2_offload.json"], {"env": {"XDG_CACHE_HOME": ""}, "files": {LOCK: ""}}, []),
        ([], {"env": {"XDG_CACHE_HOME": ""}, "files": {LOCK: ""}, "old": {LOCK: 11}}, []),
    ],
    # q_proj and v_proj of SmolLM2: 30 layers x rank 16 x (576 + 576 + 576 + 192) = 921,600 parameters. A checkpoint has
    # float32 weights and Adam's two moments, and the final weights come to a third of that.
    "disk": [
        (ADAPTER, {"disk": SimpleNamespace(free=921_600 * 16.2)}, []),
        (ADAPTER, {"disk": SimpleNamespace(free=921_600 * 15.9)}, [DISK]),
        # All 134,515,008 weights: 16 bytes each, or 8 in 16 bit.
        (["--dtype", "float32"], {"disk": SimpleNamespace(free=134_515_008 * 15.9)}, [DISK]),
        (["--dtype", "float32"], {"disk": SimpleNamespace(free=134_515_008 * 16.1)}, []),
        (["--dtype", "bfloat16"], {"disk": SimpleNamespace(free=134_515_008 * 7.9)}, [DISK]),
        (["--dtype", "float16"], {"disk": SimpleNamespace(free=134_515_008 * 8.1)}, []),
        # With a float32 copy 16 bytes, once more than the limit, and the final weights.
        *(
            (
                ["--dtype", "bfloat16", "--save_total_limit", "2", "--output_dir", "run"],
                {
                    "accelerate": {"distributed_type": "DEEPSPEED"},
                    "disk": SimpleNamespace(free=134_515_008 * size),
                    "files": files,
                },
                lines,
            )
            for size, files, lines in (
                (49.9, {}, [DISK]),
                (50.1, {}, []),
                (33.9, {"run/checkpoint-5/model.safetensors": ""}, [DISK.replace("<HERE>", "<HERE>/run")[:90]]),
                (34.1, {"run/checkpoint-5/model.safetensors": ""}, []),
            )
        ),
        ([*ADAPTER, "--save_only_model"], {"disk": SimpleNamespace(free=921_600 * 8.1)}, []),
        ([*ADAPTER, "--save_strategy", "no"], {"disk": SimpleNamespace(free=921_600 * 4.1)}, []),
        ([*ADAPTER, "--save_strategy", "no"], {"disk": SimpleNamespace(free=921_600 * 3.9)}, [DISK]),
        (["--model_name_or_path", ".", "--use_peft"], {"files": PHI}, [UNKNOWN]),
    ],
    "layout": [
        ([*GPU, *SERVER], {"gpu": [Gpu(0, 80.0, "")]}, [NEEDS_GPU]),
        ([*GPU, *SERVER], {"gpu": [Gpu(0, 80.0, "")], "started": True}, []),
        ([*GPU, *SERVER], {"gpu": [Gpu(0, 80.0, ""), Gpu(1, 80.0, "")]}, []),
    ],
    "memory": [
        (GPU, {"gpu": []}, ["info: memory is not planned: there is no GPU here. Remedy: grpo-math plan --gpus N"]),
        (
            [*GPU, *ADAPTER, *ROWS],
            {"gpu": [Gpu(0, 80.0, "")], "files": WORDS},
            ["info: memory: N GB at the peak, as planned for prompts of 23 tokens"],
        ),
        (
            [*GPU, *ADAPTER],
            {"gpu": [Gpu(0, 0.1, "")]},
            [
                "warning: memory: training needs N GB per GPU; 0.1 of N GB are usable; generation needs N GB per GPU; "
                "0.1 of N GB are usable. Remedy: take a smaller model: no change of settings makes it fit"
            ],
        ),
        (
            [*ADAPTER, "--max_completion_length", "64"],  # on the CPU
            {"gpu": []},
            ["info: memory: N GB at the peak, as planned for prompts of 8 tokens"],
        ),
        ([*SERVER, *ADAPTER, "--max_completion_length", "64"], {"gpu": []}, ["info: memory: N GB at the peak"]),
        (
            [*GPU, "--use_vllm", "--vllm_mode", "colocate", "--max_completion_length", "8190"],
            {"gpu": [Gpu(0, 80.0, "")]},
            [
                "warning: memory: prompt and completion come to 8198 tokens, and the model is given 8192. Remedy: "
                "max_completion_length: 8184"
            ],
        ),
        ([*GPU, "--model_name_or_path", "."], {"gpu": [Gpu(0, 80.0, "")], "files": PHI}, [UNKNOWN]),
        (
            [*GPU, "--optim", "adafactor"],
            {"gpu": [Gpu(0, 80.0, "")]},
            ["info: optim='adafactor' is not known to the plan. Remedy"],
        ),
        ([*GPU, *SERVER, "--vllm_tensor_parallel_size", "8"], {"gpu": [Gpu(i, 80.0, "") for i in range(9)]}, [HEADS]),
        ([*GPU, *SERVER], {"gpu": [Gpu(0, 80.0, "")], "started": True}, ["info: memory: N GB at the peak"]),
        # The state of the optimizer fills half of the memory, unless it is in main memory.
        (
            [*GPU, *ROWS],
            {"gpu": [Gpu(0, 2.5, "")], "files": WORDS, "started": True, "accelerate": OFFLOAD},
            ["info: memory: N GB at the peak"],
        ),
        (
            [*GPU, *ROWS],
            {"gpu": [Gpu(0, 2.5, "")], "files": WORDS, "started": True},
            ["warning: memory: training needs N GB per GPU"],
        ),
        # `grpo-math train` takes this config.
        (
            [*GPU, *ROWS],
            {"gpu": [Gpu(0, 2.5, "")], "files": WORDS},
            ["info: memory: N GB at the peak with zero2_offload, as planned for prompts of 23 tokens"],
        ),
    ],
    "output_dir": [
        ([], {}, []),
        ([], {"files": run_of()}, ["info: continues the run in run, whose last checkpoint is of step 12"]),
        (
            [],
            {"files": run_of(seed=1)},
            [
                "error: output_dir='run' contains a run with other settings (seed: 1 -> 42). Remedy: name a new "
                "folder, give the settings that it had, or add --resume force to continue with these"
            ],
        ),
        (["--seed", "1", "--resume_from_checkpoint", "run/checkpoint-12"], {"files": run_of(seed=1)}, []),
        (["--resume", "force"], {"files": run_of(seed=1)}, ["info: continues the run in run, whose last checkpoint"]),
        (
            [],
            {"files": {"run/config.yaml": "seed: 1"}},
            ["error: output_dir='run' contains a run that cannot be continued: its config.yaml does not"],
        ),
        (
            ["--resume_from_checkpoint", "run/checkpoint-12"],
            {"files": run_of() | {"run/config.yaml": "seed: 1"}},
            [],  # of another program
        ),
        (
            ["--resume_from_checkpoint", "run/checkpoint-7"],
            {"files": run_of()},
            ["error: resume_from_checkpoint='run/checkpoint-7' has no trainer_state.json with its step"],
        ),
    ],
    "problems": [
        (
            ROWS,
            {"files": rows_of(*HALVES)},
            [
                "info: 4 problems to train on",
                "warning: problems with different gold answers: 1; mine/3 has '7', mine/4 has '8'. Remedy: correct the",
            ],
        ),
        (ROWS, {"files": rows_of(*HALVES[:3])}, ["info: 3 problems to train on"]),
        *(
            (
                [*ROWS, "--keep_best", "--heldout_every", "4", "--heldout", f"[{{data: generated:sums, n: {n}}}]"],
                {"files": rows_of(*HALVES[:3])},
                [
                    "info: 3 problems to train on",
                    f"info: {n} problems of generated:sums, test, are evaluated during training",
                    *few,
                ],
            )
            for n, few in (
                (64, []),
                (63, ["warning: 63 problems choose the best checkpoint, so chance decides between close ones."]),
            )
        ),
        (
            ROWS,
            {"files": rows_of(("[INST] 3 + 4? [/INST]", "7"), ("<|user|>\n1 + 1?<|end|>", "2"), ("|x| < |y|?", "a"))},
            [
                "info: 3 problems to train on",
                "warning: problems that contain a chat template already: 2; the first is mine/1; the prompt becomes a",
            ],
        ),
        (
            [*ROWS, "--prompt_template", "as_is"],
            {"files": rows_of(("[INST] 3 + 4? [/INST]", "7"))},
            ["info: 1 problem to train on"],
        ),
        (
            ["--dataset", "mine.jsonl", "--eval_n", "9"],
            {"files": rows_of(*((f"Add {n} and 1,000.", str(n + 1000)) for n in range(9)))},
            [
                "info: 9 problems to train on",
                "info: 9 problems of mine.jsonl are too few to hold a tenth out of training, so the evaluation is on",
                "info: the evaluation tells little: 50% on 9 problems has the 95% interval ",
                "warning: contamination: 9 of 9 problems (100.0%) overlap with the 9 training problems: 9 equal",
            ],
        ),
        (
            ["--dataset", "mine.jsonl", "--eval_n", "64"],
            {"files": SUMS},
            [
                "info: 90 problems to train on",
                "info: 10 of the 100 problems of mine.jsonl are held out of training by a hash, to evaluate on",
                "warning: the evaluation tells little: 50% on 10 problems has the 95% interval 24% to 76%. Remedy: "
                "evaluate 50 problems or more: a larger file, or another eval_dataset",
            ],
        ),
        (
            ["--eval_n", "5", "--heldout_every", "1"],
            {},
            [
                "info: 512 problems to train on",
                "info: 64 problems of generated:sums, test, are evaluated during training",
                "info: the evaluation tells little: 50% on 5 problems has the 95% interval ",
            ],
        ),
        (
            [*SUMS_FILE, "--eval_n", "4", "--heldout", "{data: mine.jsonl}"],
            {"files": SUMS},
            [
                "info: 90 problems to train on",
                "info: 10 of the 100 problems of mine.jsonl are held out of training by a hash, to evaluate on",
                "info: 96 problems of mine.jsonl, test, are evaluated during training",
                "info: the evaluation tells little: 50% on 4 problems has the 95% interval ",
                "warning: mine.jsonl, test: contamination: 90 of 96 problems (93.8%) overlap with the 90 training "
                "problems: 90 equal, 0 by 13 words in a row. Remedy: give an eval_split, eval_dataset or heldout of",
            ],
        ),
        (
            [
                *(*SUMS_FILE, "--dataset_split", "train[20:]", "--eval_split", "train[:20]", "--eval_n", "4"),
                *("--heldout", "{data: mine.jsonl, split: 'train[:20]'}", "{data: generated, split: train, n: 5}"),
            ],
            {"files": SUMS},
            [
                "info: 80 problems to train on",
                "info: 20 problems of mine.jsonl, train[:20], are evaluated during training",
                "info: 5 problems of generated, train, are evaluated during training",
                "info: the evaluation tells little: 50% on 4 problems has the 95% interval ",
            ],
        ),
        (
            ["--eval_n", "4", "--heldout_every", "1", "--heldout", "{data: generated:sums, split: train, n: 5}"],
            {},
            [
                "info: 512 problems to train on",
                "info: 5 problems of generated:sums, train, are evaluated during training",
                "info: the evaluation tells little: 50% on 4 problems has the 95% interval ",
                "warning: generated:sums, train: contamination: 5 of 5 problems (100.0%) overlap with the 512 training",
            ],
        ),
    ],
    "batch": [
        (
            ["--per_device_train_batch_size", "8"],
            {},
            [
                "info: 1 prompt x 8 completions = 8 = 1 process x 8 rows x 1 step",
                "warning: a step has 1 prompt, so its gradient is mostly noise. Remedy: prompts_per_step: 16",
            ],
        ),
        (
            ["--num_generations", "4"],
            {"launched": 2},
            ["info: 4 prompts x 4 completions = 16 = 2 processes x 8 rows x 1 step"],
        ),
        *(
            (
                ["--prompts_per_step", "2", "--num_generations", "4", *words],
                {},
                ["info: 2 prompts x 4 completions = 8 = 1 process x 8 rows x 1 step", *lines],
            )
            for words, lines in (
                (["--method", "gspo"], [ON_POLICY]),
                (["--delta", "4"], [ON_POLICY]),
                (["--method", "gspo", "--num_iterations", "2"], []),
                (["--surrogate", "dppo"], [ON_POLICY]),
                (["--surrogate", "math:hypot"], [f"{ON_POLICY.partition(',')[0]}"]),
                (["--surrogate", "dppo", "--use_vllm"], []),  # measures from the sampler
            )
        ),
        (
            ["--prompts_per_step", "2", "--num_generations", "4", "--method", "gmpo", "--generation_batch_size", "16"],
            {},
            [
                "info: 2 prompts x 4 completions = 8 = 1 process x 8 rows x 1 step; "
                "16 completions are generated at a time"
            ],
        ),
    ],
    "golds": [
        ([*ROWS, "--prompt_template", "boxed"], {"files": golds(0)}, []),
        (
            [*ROWS, "--prompt_template", "boxed"],
            {"files": rows_of(("a?", "1 (1/2)"), ("b?", "7 apples"), ("c?", "(B)"), ("d?", r"\frac{1}{2}"))},
            [
                "warning: 1 of 4 gold answers are correct only in their own text; the first is mine/1, '1 (1/2)': "
                "'3/2' is wrong. Remedy: grpo-math audit DATA --write_clean FILE --bare_numbers writes the "
                "numbers alone"
            ],
        ),
        (
            [*ROWS, "--prompt_template", "boxed"],
            {"files": rows_of(("a?", "49,5"), ("b?", "65.990 €"), ("c?", "93 Äpfel"))},
            [
                "warning: 2 of 3 gold answers are correct only in their own text; the first is mine/1, '49,5': '49.5' "
                "is wrong. Remedy: grpo-math audit DATA --write_clean FILE --bare_numbers writes the numbers alone"
            ],
        ),
        (
            [*ROWS, "--prompt_template", "boxed"],
            {"files": rows_of(("a?", "3-Apr"), ("b?", "18 (since 9 + 9)"), ("c?", "7"))},
            [
                "warning: 2 of 3 gold answers are compared as text, so that nobody matches them in other words; the "
                "first is mine/1, '3-Apr': only the same text is correct. Remedy: correct these answers, or leave the "
                "rows out"
            ],
        ),
        ([*ROWS, "--prompt_template", "boxed"], {"files": golds(2)}, [of_golds("info", 2)]),
        ([*ROWS, "--prompt_template", "boxed"], {"files": golds(3)}, [of_golds("warning", 3)]),
        ([*ROWS, "--prompt_template", "boxed"], {"files": golds(10)}, [of_golds("warning", 10)]),
        ([*ROWS, "--prompt_template", "boxed"], {"files": golds(11)}, [of_golds("error", 11)]),
        (
            [*ROWS, "--prompt_template", "boxed"],
            {"files": rows_of(("p", "5\text{ cm}"), ("q", "7"))},
            [
                r"warning: 1 of 2 gold answers are damaged (a lost backslash, or a label); the first is mine/1, "
                r"'5\text{ cm}': read as '5\\text{ cm}'. Remedy: correct these answers, or leave the rows out"
            ],
        ),
    ],
    "rewards": [
        (["--rewards", "accuracy", "format_strict", "--reward_weights", "1", "0.5"], {}, []),
        (["--rewards", "accuracy", "--reward_weights", "1", "0.5"], {}, []),  # settings() reports it
        ([*BOXED, "tried:later"], {"files": REWARDS}, []),
        ([*BOXED, "tried:verified"], {"files": REWARDS}, []),  # Math-Verify's time limit needs the main thread
        ([*BOXED, "tried:first"], {"files": REWARDS}, []),
        ([*BOXED, "tried:short"], {"files": REWARDS}, [f"warning: the rewards (tried:short) {NOT_MORE}"]),
        ([*BOXED, "tried:worse_once"], {"files": REWARDS}, [f"warning: the rewards (tried:worse_once) {NOT_MORE}"]),
        ([*ROWS, *BOXED, "tried:short"], {"files": REWARDS | golds(100)}, []),  # golds() reports it
    ],
    "model": [
        (["--model_name_or_path", "."], {"files": PHI}, []),
        (
            ["--model_name_or_path", "me/mine"],
            {},
            [
                "error: model_name_or_path='me/mine' is neither a folder here nor in the Hub's cache, and did not come "
                "from the Hub (OfflineModeIsEnabled). Remedy: give a folder, a Hub id, or 'embedded'; grpo-math plan"
            ],
        ),
    ],
    "adapter": [
        (["--model_name_or_path", ".", "--use_peft"], {"files": PHI}, [UNKNOWN]),
        (["--use_peft"], {}, []),
        (["--lora_target_modules", "q_prj"], {}, []),  # without an adapter, nothing reads it
        (
            ["--use_peft", "--lora_target_modules", "q_proj"],
            {},
            [
                "error: lora_target_modules=['q_proj'] is one name, which TRL takes as an expression for a module's "
                'whole path. Remedy: write ".*q_proj"'
            ],
        ),
        (["--use_peft", "--lora_target_modules", r".*layers\.[02]\..*(q|v)_proj"], {}, []),
        (["--use_peft", "--lora_target_modules", r".*layers\.(1[0-9]|2[0-9])\..*q_proj"], {}, []),
        (["--use_peft", "--lora_target_modules", "layers.29.self_attn.q_proj", "v_proj"], {}, []),
        (
            ["--use_peft", "--lora_target_modules", r".*layers\.3[0-9]\..*q_proj"],  # the model has 30 layers
            {},
            ["error: lora_target_modules='.*layers\\\\.3[0-9]\\\\..*q_proj' matches no linear map of a layer"],
        ),
        (
            ["--use_peft", "--lora_target_modules", "transformer.h.0.attn.q_proj"],  # as GPT-2 names its layers
            {},
            [
                "error: lora_target_modules='transformer.h.0.attn.q_proj' matches no linear map of a layer. Remedy: "
                "use all-linear, or q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
            ],
        ),
        (["--use_peft", "--lora_target_modules", "all-linear"], {}, []),
        (["--use_peft", "--lora_modules_to_save", "lm_head", "q_proj"], {}, []),
    ],
    "end_of_turn": [
        ([], {"eos": "<end>", "files": {"generation_config.json": '{"eos_token_id": 1}'}}, []),
        ([], {"eos": "<end>", "files": {}}, []),
        ([], {"eos": "<end>", "files": {"config.json": '{"eos_token_id": [2, 1]}'}}, []),
        ([], {"eos": "<stop>", "files": {"config.json": '{"eos_token_id": [2, 1]}'}}, []),
        (
            [],
            {"eos": "<end>", "files": {"config.json": '{"eos_token_id": 2}'}},
            [
                "warning: the tokenizer's EOS is 1 and generation_config has [2]: trainers that look at one of them "
                "alone see no end. Remedy: add 1 to eos_token_id in generation_config.json"
            ],
        ),
        (
            [],
            {"eos": "<stop>", "files": {"generation_config.json": '{"eos_token_id": [2]}'}},
            [
                "error: a turn ends with '<end>' (1), and generation stops at [2]: no completion would end by itself. "
                "Remedy: add 1 to eos_token_id in generation_config.json"
            ],
        ),
        (["--prompt_template", "r1_zero"], {"eos": "<stop>", "files": {"config.json": '{"eos_token_id": 2}'}}, []),
    ],
    "chat_template": [
        ([], {}, []),
        (["--chat_template_kwargs", '{"mood": "glad"}'], {}, []),
        (
            [],
            {"template": None},
            ["error: model_name_or_path='embedded' has no chat template that takes this prompt (ValueError: Can"],
        ),
        (["--prompt_template", "r1_zero"], {"template": None}, []),
        (
            [],
            {"template": "{{ raise_exception('no such mood') }}"},
            ["error: model_name_or_path='embedded' has no chat template that takes this prompt (TemplateError: n"],
        ),
        (
            [],
            {"template": "{% if messages[1:] %}{{ raise_exception('no answers') }}{% endif %}"},
            ["error: model_name_or_path='embedded' has no chat template that takes this prompt (TemplateError: n"],
        ),
        (
            ["--chat_template_kwargs", '{"x": 1}'],
            {},
            ["error: chat_template_kwargs='x' is not a variable of this model's chat template. Remedy: leave it out"],
        ),
    ],
    "prompt_lengths": [
        (ROWS, {"files": WORDS}, [LENGTHS]),
        ([*ROWS, "--max_completion_length", "8169"], {"files": WORDS}, [LENGTHS]),
        (
            [*ROWS, "--max_completion_length", "8171"],
            {"files": WORDS},
            [LENGTHS, OVER.format(2, 8171, "max_position_embeddings of the model, 8192")],
        ),
        (
            [*ROWS, "--model_name_or_path", "."],
            {"files": {**WORDS, "config.json": '{"model_type": "gpt2", "n_positions": 530}'}},
            [LENGTHS, OVER.format(5, 512, "max_position_embeddings of the model, 530")],
        ),
        ([*ROWS, "--vllm_max_model_length", "30"], {"files": WORDS}, [LENGTHS]),
        ([*ROWS, "--use_vllm", "--vllm_max_model_length", "535"], {"files": WORDS}, [LENGTHS]),
        (
            [*ROWS, "--use_vllm", "--vllm_max_model_length", "530"],
            {"files": WORDS},
            [LENGTHS, OVER.format(5, 512, "vllm_max_model_length, 530")],
        ),
    ],
    "reference": [
        (
            [*ROWS, "--beta", "1.0", "--reference_model", "nowhere/here"],
            {"files": WORDS},
            ["error: reference_model='nowhere/here' "],
        )
    ],
    "trackers": [
        (WANDB, {"env": {"WANDB_MODE": "Disabled"}}, [f"info: wandb stays offline: WANDB_MODE=disabled. {SYNC}"]),
        (WANDB, {}, [f"info: wandb stays offline: there is no key (wandb login, or WANDB_API_KEY). {SYNC}"]),
        (WANDB, {"files": {".netrc": NETRC.replace("127", "128")}}, ["info: wandb stays offline: there is no key"]),
        (
            WANDB,
            {"env": {"WANDB_API_KEY": "secret", "WANDB_BASE_URL": "http://127.0.0.1:9"}},
            [f"info: wandb stays offline: http://127.0.0.1:9 cannot be reached. {SYNC}"],
        ),
        (WANDB, {"env": {"WANDB_API_KEY": "secret"}}, []),
        (WANDB, {"files": {".netrc": NETRC}}, []),
        (WANDB, {"files": {"mine": NETRC}, "env": {"NETRC": "mine"}}, []),
        (["--report_to", "tensorboard"], {}, []),
    ],
    "vllm_server": [
        ([*SERVER, "--vllm_server_base_url", "<URL>"], {"answers": VERSION}, []),
        ([*SERVER, "--vllm_server_host", "127.0.0.1", "--vllm_server_port", "PORT"], {"answers": VERSION}, []),
        ([*SERVER, "--vllm_server_base_url", "<URL>"], {"answers": {"/version": '{"version": "0.10.0"}'}}, ["error: "]),
        # vLLM 0.32 serves adapters. TRL 1.16 does not send whole weights to it.
        ([*SERVER, "--vllm_server_base_url", "<URL>"], {"answers": {"/version": '{"version": "0.32.0"}'}}, ["error: "]),
        (
            [*SERVER, "--vllm_server_base_url", "<URL>", "--use_peft"],
            {"answers": {"/version": '{"version": "0.32.0"}'}},
            [],
        ),
        ([*SERVER, "--vllm_server_base_url", "<URL>"], {"answers": {"/health": ""}}, []),  # TRL's own has no version
        (
            [*SERVER, "--vllm_server_host", "127.0.0.1", "--vllm_server_port", "PORT"],
            {},
            ["error: "],
        ),  # another program
        (
            [*SERVER, "--vllm_server_port", "9"],
            {},
            ["warning: no vLLM server answers at http://127.0.0.1:9. Remedy: start it before the run"],
        ),
        (["--vllm_server_base_url", "<URL>", "--vllm_mode", "server"], {}, []),
        (["--vllm_server_base_url", "<URL>", "--vllm_mode", "colocate", "--use_vllm"], {}, []),
    ],
    "hub": [
        ([], {"env": HUB, "queue": [(401, "")]}, []),
        (["--push_to_hub"], {"env": HUB, "queue": [(200, ADA)]}, []),
        (["--push_to_hub", "--hub_model_id", "ada/sums"], {"env": HUB, "queue": [(200, ADA)]}, []),
        (["--push_to_hub", "--hub_model_id", "lovelace/sums"], {"env": HUB, "queue": [(200, ADA)]}, []),
        (
            ["--push_to_hub", "--hub_model_id", "babbage/sums"],
            {"env": HUB, "queue": [(200, ADA)]},
            ["warning: hub_model_id='babbage/sums': the token belongs to ada, who is not a member of babbage. Remedy"],
        ),
        (["--push_to_hub", "--hub_model_id", "a/b/c"], {"env": HUB}, [f"error: hub_model_id='a/b/c' {NAME}"]),
        (["--push_to_hub", "--output_dir", "runs/my run"], {"env": HUB}, [f"error: hub_model_id='my run' {NAME}"]),
        (
            ["--push_to_hub"],
            {"env": HUB | {"HF_HUB_OFFLINE": "true"}},
            ["error: push_to_hub=True cannot work while HF_HUB_OFFLINE is set. Remedy: leave one of them out"],
        ),
        (
            ["--push_to_hub"],
            {"env": HUB | {"HF_TOKEN": ""}},
            ["error: the Hub requires a token. Remedy: run hf auth login, or set HF_TOKEN"],
        ),
        (["--push_to_hub", "--hub_token", "hf_x"], {"env": HUB | {"HF_TOKEN": ""}, "queue": [(200, ADA)]}, []),
        (
            ["--push_to_hub"],
            {"env": HUB | {"HF_ENDPOINT": "http://ada:secret@h"}},
            ["error: HF_ENDPOINT='http://***@h' is not an address. Remedy: give http://HOST:PORT, without a user or"],
        ),
        (
            ["--push_to_hub"],
            {"env": HUB, "queue": [(200, '{"name": "ada", "auth": {"accessToken": {"role": "read"}}}')]},
            ["error: this token of <URL> may only read. Remedy: make"],
        ),
        (
            ["--push_to_hub"],
            {"env": HUB, "queue": [(401, "")]},
            ["error: <URL> does not take this token (401). Remedy: run hf auth login again, or set another HF_TOKEN"],
        ),
        (
            ["--push_to_hub"],
            {"env": HUB, "queue": [(500, "")]},
            ["warning: the Hub cannot be reached (HfHubHTTPError). Remedy: push later: grpo-math push"],
        ),
    ],
}


@pytest.fixture(scope="module")
def server():
    server = AnsweringHTTP()
    yield server
    server.stop()


def pretend(world: dict, here: Path, url: str, monkeypatch) -> None:
    """Make this machine, its environment and its folder what ``world`` says."""
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(here)
    # A busy machine may need more than five seconds for an answer.
    monkeypatch.setattr(check_services, "SECONDS", 60.0)
    listed = "".join(f"{i}, GPU-{i}, 24576, 3, {gpu}\\n" for i, gpu in enumerate(world.get("gpus", ())))
    launching.nvidia_smi(here, listed)
    replaced = {
        "gpu": (gpus, "visible_gpus"),
        "unusable": (gpus, "unusable"),
        "disk": (check_machine.shutil, "disk_usage"),
        "include": (check_machine.sysconfig, "get_path"),
    }
    for name in replaced.keys() & world.keys():
        monkeypatch.setattr(*replaced[name], lambda *arguments, name=name: world[name])
    if "versions" in world:
        versions = {"trl": "1.16.0", "deepspeed": "0.19.8", **world["versions"]}
        monkeypatch.setattr("grpo_math.system.machine.versions", lambda: versions)
    nothing = dict.fromkeys(("WANDB_MODE", "WANDB_API_KEY"), "")
    monkeypatch.delenv("NETRC", raising=False)
    for name, value in (nothing | {"HOME": str(here), "WANDB_BASE_URL": url} | world.get("env", {})).items():
        monkeypatch.setenv(name, value.replace("<URL>", url))
    # The Hub's client reads its variables when it is imported.
    monkeypatch.setattr(
        "huggingface_hub.constants.ENDPOINT", world.get("env", {}).get("HF_ENDPOINT", "").replace("<URL>", url)
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", world.get("env", {}).get("HF_HUB_OFFLINE") != "0")
    for name, text in world.get("files", {}).items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)
        (here / name).chmod(0o600)  # else Python refuses to read .netrc
    for name, minutes in world.get("old", {}).items():
        os.utime(here / name, times=(0, time.time() - 60 * minutes))


@pytest.mark.parametrize(
    ("check", "words", "world", "lines"), [(check, *case) for check, cases in CASES.items() for case in cases]
)
def test_a_check_says_what_is_wrong_and_nothing_else(check, words, world, lines, tmp_path, server, monkeypatch):
    pretend(world, tmp_path, server.url, monkeypatch)
    server.answers, server.queue = world.get("answers", {}), list(world.get("queue", []))
    words = [word.replace("<URL>", server.url).replace("PORT", str(server.port)) for word in words]
    more = {name: world[name] for name in ("launched", "accelerate", "started") if name in world}
    made = setup(*words, **more)
    vars(made)["tokenizer"] = tokenizer_of_words(tmp_path, world.get("eos", "<end>"), world.get("template", CHAT))
    findings = [*preflight(made, named(check))]
    assert {finding.check for finding in findings} <= {check}
    output = [re.sub(r"[\d.]+ MB", "N GB", finding.line()) for finding in findings]
    output = [re.sub(r"[\d.]+(?= GB| of its)", "N", line) for line in output]
    expected = [line.replace("<URL>", server.url).replace("<HERE>", str(tmp_path)) for line in lines]
    assert [line[: len(start)] for line, start in zip(output, expected, strict=True)] == expected
    assert "secret" not in str(output)


def test_the_batch_is_that_of_the_processes_that_training_starts(tmp_path, server, monkeypatch):
    """One on each GPU, whatever an accelerate config says; the config's number on several machines and on a CPU."""
    pretend({"gpu": [Gpu(i, 80.0, "") for i in range(3)]}, tmp_path, server.url, monkeypatch)
    for words, more, processes in (
        (GPU, {"accelerate": {"num_processes": 2}, "launched": 2}, 3),
        ([*GPU, *SERVER, "--use_peft"], {}, 2),
        (GPU, {"accelerate": {"num_processes": 4}, "launched": 4, "started": True}, 4),
        ([], {"launched": 2}, 2),
    ):
        made = setup(*words, "--prompts_per_step", "12", **more)
        assert [*preflight(made, named("layout"))] == []
        [line, *_] = preflight(made, named("batch"))
        assert f"= {processes} processes x " in line.message


def test_brevity_is_judged_in_a_group_as_training_pays_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text(rows_of(("3 + 4?", "7"), ("5 + 5?", "10"))["mine.jsonl"])
    made = setup(
        *ROWS, "--prompt_template", "gsm8k", "--rewards", "accuracy", "brevity", "--reward_weights", "1", "0.3"
    )
    [first, second] = made.problems.rows
    # The first problem has answers of 6, 12 and 8 bytes, of which the last is wrong; the second a wrong one.
    texts = ["#### 7", "It is\n#### 7", "#### 877", "#### 3"]
    paid = summed(made, [first, first, first, second], texts)
    assert paid == pytest.approx([1 - 0.3 * 2 / 3 * 6 / 9, 1 - 0.3 * 2 / 3 * 12 / 9, -0.3 * 2 / 3 * 8 / 9, -0.3 / 2])

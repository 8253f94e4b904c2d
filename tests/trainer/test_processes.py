"""Training in two processes, launched for real: DDP, DeepSpeed and FSDP2, against TRL in as many processes.

A launch takes a quarter of a minute, so that several tests read what one has written (`launched`).
"""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import accelerate, ranks
from launching import run as run_to_its_end

PROGRAM = Path(__file__).parents[1] / "processes" / "train.py"
RUNS = {
    "grpo_sparse": {"rewards": "sparse", "loss_type": "grpo", "beta": 0.1},
    "small_budget": {"rewards": "sparse", "loss_type": "dr_grpo", "max_tokens_per_micro_batch": 25},
    "vespo": {"loss_type": "vespo", "sampled_apart": True},
    "torn_groups": {
        "loss_type": "bnpo",
        "num_iterations": 2,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 6,
    },
    "experts": {
        "family": "mixtral",
        "router_aux_loss_coef": 0.5,
        "per_device_train_batch_size": 8,
        "longest_first": True,
    },
}
DEEPSPEED = {
    "tiles": {"rewards": "sparse", "gradient_checkpointing": True, "tile": 8},
    "small_budget": RUNS["small_budget"],
}
POISONED = {"poisoned": {"poisoned_step": 1, "logging_steps": 1}}
# The same rows in an optimizer step, in one process and in two.
SCRIPTED = {
    "dapo with k1, two updates a rollout": {"beta": 0.2, "kl_estimator": "k1", "num_iterations": 2},
    "grpo with reinforce": {"loss_type": "grpo", "surrogate": "reinforce", "baseline": "leave_one_out"},
    "prompt_mean with dppo": {"loss_type": "prompt_mean", "surrogate": "dppo", "beta": 0.1, "num_iterations": 2},
    "dr_grpo with the batch deviation": {"loss_type": "dr_grpo", "scale_rewards": "batch"},
}
SCRIPTED_IN_DEEPSPEED = ("dapo with k1, two updates a rollout", "dr_grpo with the batch deviation", "teacher, lora")
SPARSE = {"rewards": "sparse", "ddp_timeout": 60}  # if a rank waits for one that packs, the run ends
UNPACKED = {how: {**SPARSE, "one_rank_unpacked": how} for how in ("model", "layer", "log-probs")}
BEST = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "per_device_eval_batch_size": 4,
    "num_generations_eval": 2,
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_reward",
    "greater_is_better": True,
    "eval_rewards": [1.0, 3.0, 2.0],
}
REFRESHED = {
    "beta": 0.5,
    "reference_refresh_steps": 2,
    "save_strategy": "steps",
    "save_steps": 3,
    "max_steps": 5,
    "optim": "adamw_torch",
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1.0,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 4,
}
# What the ranks of a launch must find they are.
LAUNCHED: dict[str, tuple] = {
    "one": ("NO", 1),
    "multi_gpu": ("MULTI_CPU", 2),
    "zero2_offload": ("DEEPSPEED", 2, [2, "cpu", None]),
    "zero3_offload": ("DEEPSPEED", 2, [3, "cpu", "cpu"]),
    "fsdp2": ("FSDP", 2),
}


def with_lora(runs: dict[str, dict]) -> dict[str, dict]:
    return {**runs, **{f"{name}, lora": {**given, "lora": True} for name, given in runs.items()}}


def scripted(name: str, teacher: str) -> dict[str, dict]:
    """Return the runs that are the same in one process and in two."""
    distil = {"reference_model": teacher, "beta": 0.5, "kl_estimator": "k1"}
    rows = {"rows": "scripted", "gradient_accumulation_steps": 1, "max_steps": 2}
    rows["per_device_train_batch_size"] = 16 if name == "one" else 8
    runs = {run: {**given, **rows} for run, given in {**SCRIPTED, **with_lora({"teacher": distil})}.items()}
    return {run: runs[run] for run in SCRIPTED_IN_DEEPSPEED} if "zero" in name else runs


def runs_of(name: str, teacher: str, everything: bool) -> dict[str, dict]:
    """Return what a launch trains: "trl" or "ours" -> runs. The default tier needs a part of them."""
    longest_first = {**DEEPSPEED, "small_budget": {**DEEPSPEED["small_budget"], "longest_first": True}}
    refreshed = with_lora({"refreshed": REFRESHED})
    again = {f"{run} again": {**given, "checkpoint": f"{run}/checkpoint-3"} for run, given in refreshed.items()}
    ddp = RUNS if everything else {run: RUNS[run] for run in ("grpo_sparse", "small_budget")}
    trl = {"one": {}, "multi_gpu": ddp, "zero2_offload": longest_first, "zero3_offload": DEEPSPEED}[name]
    ours = {} if name == "one" else {**trl, **POISONED}
    if name == "multi_gpu":
        ours["resampled"] = {"rows": "graded", "resample_groups": 2}
    if name == "zero3_offload":
        ours |= {**with_lora({"best": BEST}), **refreshed, **again}
    elif everything:
        ours |= scripted(name, teacher)
        if name == "multi_gpu":
            trl, ours = {**trl, "plain": SPARSE}, {**ours, **UNPACKED}
    return {"trl": trl, "ours": ours}


def launch(name: str, model: str, folder: Path, *programs: str, **kinds: dict) -> Path:
    start = [sys.executable] if name == "one" else accelerate(name, folder, "--num_processes", "2")
    run_to_its_end([*start, *programs, str(PROGRAM), model, str(folder), json.dumps(kinds)])
    return folder


@pytest.fixture(scope="module")
def launched(request, tiny, tmp_path_factory):
    """``launched("zero3_offload")``: the folder of a launch that several tests read."""
    selected = [item for item in request.session.items if item.path == request.path]
    everything = any(item.get_closest_marker("full") for item in selected)

    @cache
    def folder(name: str) -> Path:
        if "zero" in name:
            pytest.importorskip("deepspeed.ops")
        return launch(name, tiny("llama"), tmp_path_factory.mktemp(name), **runs_of(name, tiny("qwen2"), everything))

    return folder


def relative(ours: Path, trl: Path) -> float:
    one, two = (torch.cat([v.flatten() for v in torch.load(path, weights_only=True).values()]) for path in (ours, trl))
    return ((one - two).norm() / two.norm()).item()


def seen(folder: Path, run: str, name: str, kind: str = "ours") -> list[dict[str, Any]]:
    """Return what the ranks of a launch wrote of a run."""
    return ranks(folder / kind, run, *LAUNCHED[name])


def same_as_trl(folder: Path, name: str) -> None:
    """Also with fewer tokens."""
    runs = [path.stem for path in (folder / "trl").glob("*.pt") if path.stem != "plain"]
    assert "small_budget" in runs
    for run in runs:
        assert relative(folder / f"ours/{run}.pt", folder / f"trl/{run}.pt") < 1e-6, run
        tokens, plain = (sum(rank["tokens"] for rank in seen(folder, run, name, kind)) for kind in ("ours", "trl"))
        assert tokens < plain


def left_out_on_both(folder: Path, name: str) -> None:
    assert all(rank["skipped"] == [0.0, 1.0, 0.0] for rank in seen(folder, "poisoned", name))
    weights = torch.load(folder / "ours/poisoned.pt", weights_only=True)
    assert all(value.isfinite().all() for value in weights.values())


@pytest.mark.full
def test_one_process_two_and_two_of_deepspeed_give_the_same_weights_and_metrics(launched):
    """Also with a teacher, which each process has."""
    for name in ("multi_gpu", "zero2_offload"):
        for run in scripted(name, ""):
            assert relative(launched(name) / f"ours/{run}.pt", launched("one") / f"ours/{run}.pt") < 1e-6, (name, run)
            (alone,), (first, _) = (seen(launched(of), run, of) for of in ("one", name))
            for a, b in zip(first["logged"], alone["logged"], strict=True):
                assert a == pytest.approx(b, abs=1e-5), (name, run)


def test_two_ddp_processes_end_with_trls_weights_and_resample_alike(launched):
    same_as_trl(launched("multi_gpu"), "multi_gpu")
    left_out_on_both(launched("multi_gpu"), "multi_gpu")
    resampled = seen(launched("multi_gpu"), "resampled", "multi_gpu")
    assert resampled[0]["position"] == resampled[1]["position"] > 0
    counts = resampled[0]["resample"]
    assert counts["resample/drawn"] - counts["resample/thrown_away"] == 4
    assert counts["resample/kept"] > 4 / 3  # as many as chance would give


@pytest.mark.full
def test_a_rank_that_cannot_pack_leaves_every_rank_unpacked(launched):
    folder = launched("multi_gpu")
    plain = seen(folder, "plain", "multi_gpu", "trl")
    for how in UNPACKED:
        assert relative(folder / f"ours/{how}.pt", folder / "trl/plain.pt") < 1e-6, how
        assert [rank["tokens"] for rank in seen(folder, how, "multi_gpu")] == [rank["tokens"] for rank in plain], how


@pytest.mark.parametrize("name", ["zero2_offload", pytest.param("zero3_offload", marks=pytest.mark.full)])
def test_two_processes_of_deepspeed_end_with_trls_weights(name, launched):
    same_as_trl(launched(name), name)
    left_out_on_both(launched(name), name)


@pytest.mark.full
def test_two_deepspeed_processes_load_the_weights_of_the_best_checkpoint_at_the_end(launched):
    for run in with_lora({"best": BEST}):
        for rank in seen(launched("zero3_offload"), run, "zero3_offload"):
            assert rank["best"] == 2
            assert rank["weights"] == rank["saved"]["2"] != rank["saved"]["3"]


@pytest.mark.full
def test_two_fsdp2_processes_end_with_trls_weights_and_synchronise_as_often(tiny, tmp_path):
    runs = {"small_budget": {"max_tokens_per_micro_batch": 12, "use_cpu": False}}  # several parts in each training step
    launch("fsdp2", tiny("llama"), tmp_path, str(PROGRAM.with_name("fsdp_on_cpu.py")), trl=runs, ours=runs)
    same_as_trl(tmp_path, "fsdp2")
    ours, trl = (seen(tmp_path, "small_budget", "fsdp2", kind)[0]["reduce_scatters"] for kind in ("ours", "trl"))
    assert ours == trl > 0


@pytest.mark.full
def test_the_kl_is_zero_after_each_refresh_of_a_split_reference_also_after_a_checkpoint(launched):
    folder = launched("zero3_offload")
    for run in with_lora({"refreshed": REFRESHED}):
        kl, kl_again = (seen(folder, of, "zero3_offload")[0]["kl"] for of in (run, f"{run} again"))
        assert [abs(value) < 1e-7 for value in kl] == [True, False, True, False, True], kl
        assert kl_again[-2:] == kl[3:]
        reference = folder / "ours" / run / "checkpoint-3/reference"
        assert [path.name for path in reference.iterdir()] == ["weights.safetensors"]

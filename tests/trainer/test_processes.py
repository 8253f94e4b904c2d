"""Training in two processes, launched for real: DDP, DeepSpeed and FSDP2, against TRL in as many processes."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import TORCHRUN, accelerate, ranks, run

PROGRAM = Path(__file__).parents[1] / "processes" / "train.py"
RUNS = {
    "dapo": {},
    "grpo_sparse": {"rewards": "sparse", "loss_type": "grpo", "beta": 0.1},
    "small_budget": {"rewards": "sparse", "loss_type": "dr_grpo", "max_tokens_per_micro_batch": 25},
    "several_updates": {"num_iterations": 2, "loss_type": "bnpo"},
    "vespo": {"loss_type": "vespo", "sampled_apart": True},
    "torn_groups": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 6},
}


def launch(start: list[str], model: str, folder: Path, **kinds: dict) -> None:
    run([*start, str(PROGRAM), model, str(folder), json.dumps(kinds)])


def relative(ours: Path, trl: Path) -> float:
    one, two = (torch.cat([v.flatten() for v in torch.load(path, weights_only=True).values()]) for path in (ours, trl))
    return ((one - two).norm() / two.norm()).item()


def both(
    start: list[str], model: str, tmp_path: Path, runs: dict, launched: tuple, only_ours: Any = ()
) -> dict[str, list]:
    """Train in TRL and here; what the ranks wrote of our runs. ``launched``: what the processes must find they are."""
    launch(start, model, tmp_path, trl=runs, ours={**runs, **dict(only_ours)})
    for name in runs:
        seen = ranks(tmp_path / "ours", name, *launched)
        plain = ranks(tmp_path / "trl", name, *launched)
        assert relative(tmp_path / "ours" / f"{name}.pt", tmp_path / "trl" / f"{name}.pt") < 1e-6, name
        assert sum(rank["tokens"] for rank in seen) < sum(rank["tokens"] for rank in plain)
    return {name: ranks(tmp_path / "ours", name, *launched) for name in dict(only_ours)}


SHORT = {"rows": "scripted", "gradient_accumulation_steps": 1, "max_steps": 2}
# The same rows in an optimizer step, in one process and in two.
SCRIPTED = {
    "dapo with k1, two updates a rollout": {"beta": 0.2, "kl_estimator": "k1", "num_iterations": 2},
    "grpo with reinforce": {"loss_type": "grpo", "surrogate": "reinforce", "baseline": "leave_one_out"},
    "prompt_mean with dppo": {"loss_type": "prompt_mean", "surrogate": "dppo", "beta": 0.1, "num_iterations": 2},
    "dr_grpo with the batch deviation, on two of four": {
        "loss_type": "dr_grpo",
        "scale_rewards": "batch",
        "train_completions": 2,
    },
}


@pytest.mark.full
def test_one_process_two_and_two_of_deepspeed_give_the_same_weights_and_metrics(tiny, tmp_path):
    pytest.importorskip("deepspeed.ops")
    starts = {
        ("NO", 1): [sys.executable],
        ("MULTI_CPU", 2): TORCHRUN,
        ("DEEPSPEED", 2, (2, "cpu", None)): accelerate("zero2_offload", tmp_path, "--num_processes", "2"),
    }
    one = tmp_path / "1NO/ours"
    for (kind, processes, *zero), start in starts.items():
        folder, rows = tmp_path / f"{processes}{kind}/ours", 16 // processes
        runs = {name: {**run, **SHORT, "per_device_train_batch_size": rows} for name, run in SCRIPTED.items()}
        launch(start, tiny("llama"), folder.parent, ours=runs)
        for name in runs:
            seen = ranks(folder, name, kind, processes, *map(list, zero))
            assert relative(folder / f"{name}.pt", one / f"{name}.pt") < 1e-6, (kind, name)
            alone = json.loads((one / f"{name}.0.json").read_text())["logged"]
            for a, b in zip(seen[0]["logged"], alone, strict=True):
                assert a == pytest.approx(b, abs=1e-5), (kind, name)


POISONED = {"poisoned": {"poisoned_step": 1, "logging_steps": 1}}


def left_out_on_both(of_ranks: list[dict[str, Any]], folder: Path) -> None:
    assert all(rank["skipped"] == [0.0, 1.0, 0.0] for rank in of_ranks)
    assert all(value.isfinite().all() for value in torch.load(folder / "poisoned.pt", weights_only=True).values())


def test_two_ddp_processes_end_with_trls_weights_and_resample_alike(tiny, tmp_path):
    start = accelerate("multi_gpu", tmp_path, "--num_processes", "2")
    experts = {"family": "mixtral", "router_aux_loss_coef": 0.5, "per_device_train_batch_size": 8}
    runs = {**RUNS, "dapo": {"longest_first": True}, "experts": experts}
    only_ours = {"resampled": {"rows": "graded", "resample_groups": 2}, **POISONED}
    seen = both(start, tiny("llama"), tmp_path, runs, ("MULTI_CPU", 2), only_ours)
    left_out_on_both(seen["poisoned"], tmp_path / "ours")
    resampled = seen["resampled"]
    assert resampled[0]["position"] == resampled[1]["position"] > 0
    counts = resampled[0]["resample"]
    assert counts["resample/drawn"] - counts["resample/thrown_away"] == 4
    assert counts["resample/kept"] > 4 / 3  # as many as chance would give


@pytest.mark.full
def test_a_rank_that_cannot_pack_leaves_every_rank_unpacked(tiny, tmp_path):
    start = accelerate("multi_gpu", tmp_path, "--num_processes", "2")
    sparse = {"rewards": "sparse", "ddp_timeout": 60}  # if a rank waits for one that packs, the run ends
    runs = {how: {**sparse, "one_rank_unpacked": how} for how in ("model", "layer", "log-probs")}
    launch(start, tiny("llama"), tmp_path, trl={"plain": sparse}, ours=runs)
    plain = ranks(tmp_path / "trl", "plain", "MULTI_CPU", 2)
    for how in runs:
        assert relative(tmp_path / f"ours/{how}.pt", tmp_path / "trl/plain.pt") < 1e-6, how
        seen = ranks(tmp_path / "ours", how, "MULTI_CPU", 2)
        assert [rank["tokens"] for rank in seen] == [rank["tokens"] for rank in plain], how


@pytest.mark.full(keep=["zero2_offload"])
@pytest.mark.parametrize(("name", "zero"), [("zero2_offload", [2, "cpu", None]), ("zero3_offload", [3, "cpu", "cpu"])])
def test_two_deepspeed_processes_end_with_trls_weights(name, zero, tiny, tmp_path):
    pytest.importorskip("deepspeed.ops")
    runs = {"tiles": {"rewards": "sparse", "gradient_checkpointing": True, "tile": 8}}
    runs |= {"small_budget": {**RUNS["small_budget"], "longest_first": zero[0] < 3}}
    start = accelerate(name, tmp_path, "--num_processes", "2")
    seen = both(start, tiny("llama"), tmp_path, runs, ("DEEPSPEED", 2, zero), only_ours=POISONED)
    left_out_on_both(seen["poisoned"], tmp_path / "ours")


@pytest.mark.full
def test_a_teacher_is_scored_alike_by_two_processes_of_ddp_and_of_zero_2(tiny, tmp_path):
    pytest.importorskip("deepspeed.ops")
    distil = {"reference_model": tiny("qwen2"), "beta": 0.5, "kl_estimator": "k1", "rewards": "sparse"}
    runs = {"teacher": distil, "lora": {**distil, "lora": True}}
    for name in ("multi_gpu", "zero2_offload"):
        start = accelerate(name, tmp_path, "--num_processes", "2")
        launch(start, tiny("llama"), tmp_path / name, ours=runs)
    for name in runs:
        ends = [tmp_path / start / f"ours/{name}.pt" for start in ("multi_gpu", "zero2_offload")]
        assert relative(*ends) < 1e-6, name


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


@pytest.mark.full
@pytest.mark.parametrize("stage", [2, 3])
def test_two_deepspeed_processes_load_the_weights_of_the_best_checkpoint_at_the_end(stage, tiny, tmp_path):
    pytest.importorskip("deepspeed.ops")
    start = accelerate(f"zero{stage}", tmp_path, "--num_processes", "2")
    launch(start, tiny("llama"), tmp_path, ours={"plain": BEST, "lora": {**BEST, "lora": True}})
    for name in ("plain", "lora"):
        for rank in ranks(tmp_path / "ours", name, "DEEPSPEED", 2, [stage, None, None]):
            assert rank["best"] == 2
            assert rank["weights"] == rank["saved"]["2"] != rank["saved"]["3"]


@pytest.mark.full
def test_two_fsdp2_processes_end_with_trls_weights_and_synchronise_as_often(tiny, tmp_path):
    runs = {"small_budget": {"max_tokens_per_micro_batch": 12, "use_cpu": False}}  # several parts in each training step
    start = accelerate("fsdp2", tmp_path, "--num_processes", "2")
    both([*start, str(PROGRAM.with_name("fsdp_on_cpu.py"))], tiny("llama"), tmp_path, runs, ("FSDP", 2))
    ours, trl = (ranks(tmp_path / kind, "small_budget", "FSDP", 2)[0]["reduce_scatters"] for kind in ("ours", "trl"))
    assert ours == trl > 0


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


@pytest.mark.full
def test_the_kl_is_zero_after_each_refresh_of_a_split_reference_also_after_a_checkpoint(tiny, tmp_path):
    runs = {"full": REFRESHED, "lora": {**REFRESHED, "lora": True}}
    resumed = {f"{name} again": {**run, "checkpoint": f"{name}/checkpoint-3"} for name, run in runs.items()}
    start, launched = accelerate("zero3_offload", tmp_path, "--num_processes", "2"), ("DEEPSPEED", 2, [3, "cpu", "cpu"])
    launch(start, tiny("llama"), tmp_path, ours={**runs, **resumed})
    for name in runs:
        kl, kl_again = (ranks(tmp_path / "ours", of, *launched)[0]["kl"] for of in (name, f"{name} again"))
        assert [abs(value) < 1e-7 for value in kl] == [True, False, True, False, True], kl
        assert kl_again[-2:] == kl[3:]
        reference = tmp_path / "ours" / name / "checkpoint-3/reference"
        assert [path.name for path in reference.iterdir()] == ["weights.safetensors"]

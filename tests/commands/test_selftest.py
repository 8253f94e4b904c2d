"""`grpo-math selftest` on this machine, and on a trainer that is broken on purpose."""

import json
import os
from dataclasses import replace

import pytest
import torch
from trl import GRPOTrainer

from grpo_math import cli
from grpo_math.algorithm import loss_inputs, losses
from grpo_math.algorithm.reference import Reference
from grpo_math.checks import selftest
from grpo_math.generation import decoding
from grpo_math.generation.folded_adapter import FoldedLayer
from grpo_math.packing import micro_batches
from grpo_math.packing.micro_batches import UpdatePlanner
from grpo_math.trainer import contract, rollout_in_progress, state
from grpo_math.trainer.rollout_queue import RolloutQueue
from grpo_math.trainer.trainer import MathGRPOTrainer

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("GRPO_MATH_CACHE", str(tmp_path))


@pytest.mark.full
def test_all_is_as_trl_and_then_no_run_warns(capsys):
    assert not contract.passed().exists()
    assert cli.main(["selftest", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ok"], answer["untested"], len(answer["checks"])) == (True, [], 30)
    assert contract.passed().exists()


grpo = losses.REDUCTIONS["grpo"]
# A defect -> the check that notices it, what is replaced, and by what.
DEFECTS = {
    "sign of the advantage": (
        "dapo",
        (rollout_in_progress, "advantages"),
        lambda *args, advantages=rollout_in_progress.advantages: -advantages(*args),
    ),
    "dropped mask": ("dapo", (loss_inputs, "loss_mask"), lambda rows: torch.ones_like(rows["completion_mask"])),
    "denominator": (
        "grpo, acc",
        (losses, "REDUCTIONS"),
        losses.REDUCTIONS | {"grpo": grpo._replace(function=lambda *args: 1.01 * grpo.function(*args))},
    ),
    "weight of a micro-batch": (
        "several",
        (micro_batches, "micro_batch_weight"),
        lambda *args, weight=micro_batches.micro_batch_weight: min(1.0, 2 * weight(*args)),
    ),
    "weight lost in a split": (
        "out of memory",
        (UpdatePlanner, "smaller"),
        lambda *args, smaller=UpdatePlanner.smaller: [replace(one, weight=1.0) for one in smaller(*args)],
    ),
    "tool tokens": ("tools", (loss_inputs, "loss_mask"), lambda rows: rows["completion_mask"]),
    "sampler": ("of a sampler", (losses, "corrected_for_sampler"), lambda values, *_: values),
    "resume": ("resume", (MathGRPOTrainer, "_load_rng_state"), lambda *_: None),
    "lost rollout": ("resume", (state, "in_rollout"), lambda trainer: False),
    "loss since the last line": ("resume", (state, "ATTRIBUTES"), tuple({*state.ATTRIBUTES} - {"_tr_loss"})),
    "order of the second epoch": ("resume", (RolloutQueue, "sampler"), property(lambda self: None, lambda *_: None)),
    "lost optimizer": ("resume", (MathGRPOTrainer, "_load_optimizer_and_scheduler"), lambda *_: None),
    "weight of a reward": (
        "dr_grpo",
        (rollout_in_progress, "weighted"),
        lambda rewards, weights, weighted=rollout_in_progress.weighted: weighted(rewards, weights / weights),
    ),
    "entropy of a micro-batch": (
        "entropy, tr",
        (losses, "entropy_sums"),
        lambda inputs, sums=losses.entropy_sums: sums(inputs) * torch.tensor([inputs.accumulation, 1]),
    ),
    "rows of another training step": (
        "bnpo",
        (UpdatePlanner, "gather_planned"),
        lambda self, rows, budget, gather=UpdatePlanner.gather_planned: gather(self, rows[:1] * len(rows), budget),
    ),
    "refresh of the reference": ("refreshed", (Reference, "refresh"), lambda self: None),
    "folded adapter": ("LoRA", (FoldedLayer, "__call__"), lambda self, inputs: self.base(inputs)),
    "shared prefix": (
        "greedy",
        (decoding, "fill_shared_prefix"),
        lambda *args, fill=decoding.fill_shared_prefix: max(0, fill(*args) - 1),
    ),
}


@pytest.mark.full(keep=["sign", "mask", "denominator"])
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_noticed(defect, monkeypatch, capsys):
    check, place, broken = DEFECTS[defect]
    monkeypatch.setattr(*place, broken)
    assert cli.main(["selftest", "--only", check]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "NOT OK" in lines[0]
    assert lines[-1] == "not ok: 1 of 1 checks deviate"
    assert not contract.passed().exists()


def test_other_number_formats_are_set_back_for_the_checks_alone(monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    torch.set_default_dtype(torch.bfloat16)
    torch.set_float32_matmul_precision("medium")
    try:
        assert cli.main(["selftest", "--only", "sapo"]) == 0
        left = os.environ["ACCELERATE_MIXED_PRECISION"], torch.get_default_dtype(), torch.get_float32_matmul_precision()
        assert left == ("bf16", torch.bfloat16, "medium")
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
    assert capsys.readouterr().out.endswith("ok: as TRL and transformers\n")


def test_a_word_of_no_check_is_an_error(capsys):
    assert cli.main(["selftest", "--only", "rloo"]) == 2
    assert "only='rloo' is in the name of no check: use a word of training: dapo" in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_leaves_the_verdict(monkeypatch, tmp_path, capsys):
    (tmp_path / "selftest").touch()
    monkeypatch.setattr(selftest, "checks", lambda *_: [selftest.Check("none", "0", 0, lambda: 0.0)])
    assert cli.main(["selftest"]) == 0
    line = (
        f"ok: as TRL and transformers (runs go on warning, because {tmp_path}/selftest cannot be written: File exists)"
    )
    assert capsys.readouterr().out.splitlines()[-1] == line


def test_it_says_first_that_stock_trl_cannot_train(monkeypatch, capsys):
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", None)
    assert cli.main(["selftest", "--only", "training"]) == 1
    first, *_, last = capsys.readouterr().out.splitlines()
    assert "NOT OK" in first
    assert "stock TRL cannot train here: TypeError: 'NoneType' object is not callable" in first
    assert last == "not ok: 1 of 1 checks deviate"

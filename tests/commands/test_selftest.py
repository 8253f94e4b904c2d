"""`grpo-math selftest` on this machine, and on a trainer that is broken on purpose."""

import json

import pytest
import torch
from trl import GRPOTrainer

from grpo_math import cli
from grpo_math.algorithm import loss_inputs, losses
from grpo_math.generation import decoding
from grpo_math.trainer import contract, rollout_in_progress
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
    assert (answer["ok"], answer["untested"], len(answer["checks"])) == (True, [], 14)
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
    "sampler": ("of a sampler", (losses, "corrected_for_sampler"), lambda values, *_: values),
    "resume": ("resume", (MathGRPOTrainer, "_load_rng_state"), lambda *_: None),
    "lost optimizer": ("resume", (MathGRPOTrainer, "_load_optimizer_and_scheduler"), lambda *_: None),
    "weight of a reward": (
        "dr_grpo",
        (rollout_in_progress, "weighted"),
        lambda rewards, weights, weighted=rollout_in_progress.weighted: weighted(rewards, weights / weights),
    ),
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


def test_it_says_first_that_stock_trl_cannot_train(monkeypatch, capsys):
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", None)
    assert cli.main(["selftest", "--only", "training"]) == 1
    first, *_, last = capsys.readouterr().out.splitlines()
    assert "NOT OK" in first
    assert "stock TRL cannot train here: TypeError: 'NoneType' object is not callable" in first
    assert last == "not ok: 1 of 1 checks deviate"

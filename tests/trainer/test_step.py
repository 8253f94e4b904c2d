"""An optimizer step: without memory it is done again in halves, a gradient that is not finite moves no weight.

Memory is made to run out by hooks on the model: there is no GPU here whose memory could.
"""

import time
from itertools import pairwise
from unittest.mock import Mock

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, get_peft_model
from small_generation import of_library
from small_trainers import KINDS, SMALL, STEPS, letters, relative, runs_out_forward, weights
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOTrainer

from grpo_math.algorithm.loss_metrics import LossMetrics
from grpo_math.errors import ConfigError, UserError
from grpo_math.run import metrics
from grpo_math.trainer.trainer import MathGRPOTrainer

AS_TRL = {**SMALL, **STEPS}


def runs_out_backward(model, limit):
    """Every backward pass with more tokens fails at the first layer, when the others have their gradients."""

    def hook(module, grad_input, grad_output):
        if grad_output[0].size(1) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    model.model.layers[0].register_full_backward_hook(of_library(hook))


@pytest.mark.full(keep=["bnpo-runs_out_backward"])
@pytest.mark.parametrize("where", [runs_out_forward, runs_out_backward])
@pytest.mark.parametrize("loss_type", ["dapo", "bnpo"])
def test_the_step_is_done_again_with_fewer_tokens_and_gives_the_same_weights(where, loss_type, trl_run, ours, caplog):
    trainer = ours(**AS_TRL, loss_type=loss_type)
    where(trainer.model, 30)
    trainer.train()
    assert trainer.state.global_step == 3
    assert 0 < trainer.grpo_math.updates.budget.tokens <= 60
    assert "max_tokens_per_micro_batch is now" in caplog.text
    assert relative(weights(trainer.model), trl_run(letters, {**SMALL, "loss_type": loss_type})[1]) < 1e-6


def test_memory_that_runs_out_while_earlier_steps_are_replayed_loses_no_step(trl_run, ours):
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "loss_type": "bnpo"}
    # Small enough for micro-batches in both training steps.
    trainer, failures = ours(**STEPS, **settings, max_tokens_per_micro_batch=40), []

    updates, first_step = trainer.grpo_math.updates, set()
    loss_of = updates.loss_of

    def loss(model, rows, step):
        completions = {str(ids[ids != 2].tolist()) for ids in rows["completion_ids"]}
        if not step.done and trainer.state.global_step == 0:
            first_step.update(completions)
        # Once in the second training step, and once more while the first one is replayed for it.
        elif len(failures) < 2:
            failures.append(completions <= first_step)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return loss_of(model, rows, step)

    counts, log = [], trainer.log

    def counted(*args):
        counts.append(len(trainer._metrics["train"].get("entropy", ())))
        return log(*args)

    trainer.log, updates.loss_of = counted, loss
    trainer.train()
    assert failures == [False, True]
    # An optimizer step is logged once, with the rows of the attempt that succeeded.
    assert counts == [1, 1, 1, 0]
    assert relative(weights(trainer.model), trl_run(letters, settings)[1]) < 1e-6


def test_seconds_of_a_failed_attempt_are_seconds_of_the_step(ours):
    trainer = ours(max_steps=1, logging_steps=1)
    runs_out_forward(trainer.model, 30)
    generate = trainer._generate_single_turn
    # Longer than everything else in the step: the attempt that fails has sampled, and the last one has not.
    trainer._generate_single_turn = lambda *args, **kwargs: time.sleep(0.5) or generate(*args, **kwargs)
    trainer.train()
    assert trainer.grpo_math.updates.budget.halved_to
    assert trainer.state.log_history[0][metrics.SECONDS_UPDATE] > 0


class Interrupts(TrainerCallback):
    """Interrupts a run once, within this optimizer step."""

    def __init__(self, step):
        self.step = step

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.step = None
            raise KeyboardInterrupt


def test_a_call_that_was_interrupted_within_an_optimizer_step_leaves_nothing_to_the_next(ours, monkeypatch):
    counted = []
    reduce = LossMetrics.reduce
    monkeypatch.setattr(LossMetrics, "reduce", lambda self, ranks, n: counted.append(n) or reduce(self, ranks, n))
    trainer = ours(**AS_TRL, save_strategy="steps", save_steps=1)
    trainer.add_callback(Interrupts(1))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert len(trainer.grpo_math.updates.step.done) == 1
    trainer.train(resume_from_checkpoint=True)
    assert counted == [4] * 3


def test_a_call_that_begins_within_a_rollout_keeps_rows_in_their_optimizer_steps_as_trl(ours):
    ends = []
    for kind in ("ours", "trl"):
        trainer = ours(letters, folder=kind, **{**AS_TRL, **KINDS[kind]}, steps_per_generation=6)
        trainer.add_callback(Interrupts(0))
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.model.zero_grad()
        trainer.train()
        ends.append(weights(trainer.model))
    assert relative(*ends) < 1e-6


def test_adaptive_entropy_moves_once_in_an_optimizer_step_also_if_a_subclass_sees_rows(ours, caplog):
    class Own(MathGRPOTrainer):
        def _prepare_inputs(self, batch):
            return super()._prepare_inputs(batch)

    adaptive = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 99.0, "entropy_coef_delta": 0.001}
    settings = {**SMALL, **adaptive, "surrogate": "reinforce", "max_steps": 1, "logging_steps": 1}
    for trainer_class in (MathGRPOTrainer, Own):
        trainer = ours(trainer_class=trainer_class, **settings)
        trainer.train()
        assert trainer.entropy_coef == pytest.approx(0.011)
    assert caplog.text.count("Switched off: shared updates: Own overrides _prepare_inputs;") == 1


@pytest.mark.parametrize(
    ("settings", "alone", "limit", "advice"),
    [
        ({}, True, 0, r"one completion, [0-9]+ tokens with its prompt: turn gradient_checkpointing"),
        # A loss over whole micro-batches is not cut.
        ({"entropy_coef": 0.01}, True, 0, r"set max_tokens_per_micro_batch|gradient_checkpointing"),
        # With several processes, the others would not do the step again.
        ({}, False, 30, r"set max_tokens_per_micro_batch to [0-9]+, or turn gradient_checkpointing on"),
    ],
)
def test_a_step_that_cannot_be_done_again_ends_with_advice(settings, alone, limit, advice, ours):
    trainer = ours(**AS_TRL, **settings)
    trainer.grpo_math.updates.budget.is_single_process = alone
    runs_out_forward(trainer.model, limit)
    with pytest.raises(UserError, match=advice):
        trainer.train()


def test_memory_that_runs_out_in_generation_is_not_ours_to_mend(ours, monkeypatch):
    trainer = ours(**AS_TRL)
    monkeypatch.setattr(trainer.model, "generate", Mock(side_effect=torch.OutOfMemoryError("in generate")))
    with pytest.raises(torch.OutOfMemoryError, match="in generate"):
        trainer.train()


@pytest.mark.full(keep=["inf"])
@pytest.mark.parametrize(("factor", "max_grad_norm"), [(float("nan"), 1.0), (float("inf"), 0.0)])
def test_a_gradient_that_is_not_finite_moves_no_weight_and_the_run_goes_on(factor, max_grad_norm, ours):
    trainer = ours(optim="adamw_torch", max_grad_norm=max_grad_norm, logging_steps=1, max_steps=4)
    loss_of, before = trainer.grpo_math.updates.loss_of, []

    def loss(*args):
        before.append(weights(trainer.model))
        result = loss_of(*args)
        return result._replace(loss=result.loss * (factor if trainer.state.global_step == 1 else 1.0))

    trainer.grpo_math.updates.loss_of = loss
    trainer.train()
    changed = [not torch.equal(*pair) for pair in pairwise([*before, weights(trainer.model)])]
    assert changed == [True, False, True, True]
    assert weights(trainer.model).isfinite().all()
    assert [line.get(metrics.SKIPPED) for line in trainer.state.log_history] == [0.0, 1.0, 0.0, 0.0, None]


def test_an_optimizer_that_steps_in_each_backward_pass_leaves_no_rows_to_regroup(small, ours):
    model = AutoModelForCausalLM.from_pretrained(small)
    next(model.parameters()).register_post_accumulate_grad_hook(lambda weight: None)
    assert ours(model=model).grpo_math.scorer.packed is None


@pytest.mark.parametrize("owner", ["an accelerator", "its class"])
def test_a_script_that_replaces_backward_gets_the_passes_of_trl(owner, ours, monkeypatch, caplog):
    passes = []

    def backward(loss, **kwargs):
        passes.append(loss)
        loss.backward(**kwargs)

    trainer = ours(**AS_TRL)
    if owner == "its class":
        monkeypatch.setattr(Accelerator, "backward", lambda self, loss, **kwargs: backward(loss, **kwargs))
    else:
        trainer.accelerator.backward = backward
    trainer.train()
    assert len(passes) == SMALL["gradient_accumulation_steps"] * STEPS["max_steps"]
    assert caplog.text.count("Switched off: shared updates: a script has replaced accelerator.backward;") == 1


@pytest.mark.parametrize("unfrozen", [None, "before", "in a callback"])
def test_a_frozen_adapter_is_refused_when_training_begins(unfrozen, small, ours, tmp_path):
    adapter = get_peft_model(AutoModelForCausalLM.from_pretrained(small), LoraConfig(target_modules=["q_proj"]))
    adapter.save_pretrained(tmp_path / "adapter")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(small), tmp_path / "adapter")
    trainer = ours(model=model, max_steps=1, gradient_checkpointing=True)
    if unfrozen == "before":
        model.set_requires_grad("default")
    elif unfrozen == "in a callback":
        own = TrainerCallback()
        own.on_train_begin = lambda *_, **__: model.set_requires_grad("default")
        trainer.optimizer = torch.optim.SGD(model.parameters(), 0.1)
        trainer.add_callback(own)
    before = weights(model)
    if unfrozen is None:
        with pytest.raises(ConfigError, match="is frozen: no parameter of the optimizer requires a gradient"):
            trainer.train()
    else:
        trainer.train()
    assert torch.equal(weights(model), before) == (unfrozen is None)


def test_a_patch_of_trls_loss_is_refused_with_a_loss_that_trl_lacks(ours, monkeypatch):
    loss = GRPOTrainer._compute_loss
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda *rows: loss(*rows) / 2)
    ours(max_steps=1).train()
    with pytest.raises(ConfigError, match=r"does not work with a patch of GRPOTrainer\._compute_loss"):
        ours(max_steps=1, surrogate="reinforce").train()

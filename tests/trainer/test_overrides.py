"""What a subclass, a replaced method or a callback sees is TRL's, and what it changes counts as in TRL."""

from functools import partial
from unittest.mock import Mock

import pytest
import torch
from small_trainers import KINDS, SMALL, STEPS, letters, relative, weights
from trl import GRPOTrainer

from grpo_math.run.speed_ups import SPEED_UPS
from grpo_math.trainer.overrides import ROW_METHODS, SCORING, sees_rows
from grpo_math.trainer.trainer import MathGRPOTrainer


def subclass_of(base, name, change, title="Changed"):
    """``change``: what the subclass does in this method, given the trainer, the method of ``base`` and arguments."""

    def changed(trainer, *args, **kwargs):
        return change(trainer, partial(getattr(base, name), trainer), *args, **kwargs)

    return type(title, (base,), {name: changed})


def stretched(inputs):
    return {**inputs, "advantages": inputs["advantages"] ** 2 - 0.5}


# What it changes


def writes_rows_in_the_loss(trainer, method, model, inputs):
    return method(model, stretched(inputs))


def writes_rows_before_the_loss(trainer, method, model, inputs, *more, **named):
    inputs |= stretched(inputs)
    return method(model, inputs, *more, **named)


def has_a_loss_of_its_own(trainer, method, model, inputs):
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    keep = inputs["completion_ids"].size(1)
    logps, entropies, _ = trainer._get_per_token_logps_and_entropies(model, ids, mask, keep, compute_entropy=True)
    per_token = -logps * inputs["advantages"][:, None] - 0.1 * entropies
    return (per_token * inputs["completion_mask"]).sum() / inputs["completion_mask"].sum()


def changes_rewards(trainer, method, *args):
    return method(*args) ** 2


def changes_the_rollout(trainer, method, inputs):
    output = stretched(method(inputs))
    return output | {"weights_of_rows": torch.arange(8), "two_of_each": torch.ones(8, 2)}


def scores_by_itself(
    trainer, method, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **kwargs
):
    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
    logps = logits.log_softmax(-1)
    entropies = -(logps.exp() * logps).sum(dim=-1) if compute_entropy else None
    return logps.gather(2, input_ids[:, -logits_to_keep:, None])[:, :, 0] * 0.5, entropies, None


CHANGES = {
    writes_rows_in_the_loss: "_compute_loss",
    writes_rows_before_the_loss: "compute_loss",
    has_a_loss_of_its_own: "_compute_loss",
    changes_rewards: "_calculate_rewards",
    changes_the_rollout: "_generate_and_score_completions",
    scores_by_itself: SCORING,
}


@pytest.mark.slow
@pytest.mark.full(keep=["changes_rewards"])
@pytest.mark.parametrize(
    ("change", "where"),
    [
        *((change, "subclass") for change in CHANGES),
        *((writes_rows_in_the_loss, where) for where in ("trainer", "TRL's class")),
        (scores_by_itself, "TRL's class"),
    ],
)
def test_what_a_subclass_or_a_script_changes_trains_the_weights_that_it_does_with_trl(
    change, where, trl_run, ours, monkeypatch
):
    unchanged, name, ended = trl_run(letters, SMALL)[1], CHANGES[change], {}
    if where == "TRL's class":
        original = type("Original", (GRPOTrainer,), {name: getattr(GRPOTrainer, name)})
        monkeypatch.setattr(GRPOTrainer, name, vars(subclass_of(original, name, change))[name])
    for kind, base in (("trl", GRPOTrainer), ("ours", MathGRPOTrainer)):
        trainer_class = subclass_of(base, name, change) if where == "subclass" else base
        trainer = ours(folder=kind, **{**SMALL, **STEPS, **KINDS[kind], "trainer_class": trainer_class})
        if where == "trainer":
            setattr(trainer, name, partial(change, trainer, getattr(trainer, name)))
        trainer.train()
        ended[kind] = weights(trainer.model)
    assert relative(ended["ours"], ended["trl"]) < 1e-5
    assert relative(ended["ours"], unchanged) > 1e-5  # so the change is seen at all


def test_a_setting_that_a_script_gives_the_trainer_counts_as_in_trl(ours):
    ended = {}
    for kind in KINDS:
        trainer = ours(folder=kind, **{**SMALL, **STEPS, **KINDS[kind]})
        trainer.scale_rewards, trainer.beta, trainer.epsilon_high = "none", 0.0, 0.5
        trainer.train()
        ended[kind] = weights(trainer.model)
    assert relative(ended["ours"], ended["trl"]) < 1e-6


@pytest.mark.parametrize("method", ROW_METHODS)
def test_one_line_says_why_updates_are_not_put_together(method, ours, caplog):
    assert not sees_rows(ours())
    told = subclass_of(MathGRPOTrainer, method, lambda *args: None, title="Told")
    trainer = ours(trainer_class=told)
    assert sees_rows(trainer)
    lines = [record.message for record in caplog.records if "Told" in record.message]
    assert lines == [f"Switched off: shared updates: Told overrides {method}; {SPEED_UPS['shared updates']}."]
    assert trainer.scorer is not None


def test_a_method_that_a_script_replaces_in_trls_class_gets_trls_rows_and_its_scores_count(ours, monkeypatch):
    trainer, scores = ours(), Mock(return_value=(torch.zeros(1, 1), None, None))
    monkeypatch.setattr(GRPOTrainer, SCORING, lambda *args, **kwargs: scores())
    assert sees_rows(trainer)
    assert getattr(trainer, SCORING)(trainer.model, torch.zeros(1, 2), None, 1)[0].tolist() == [[0]]
    scores.assert_called_once()

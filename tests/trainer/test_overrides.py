"""What a subclass, a replaced method or a callback sees is TRL's, and what it changes counts as in TRL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_trainers import SMALL, letters, make, relative, weights
from trl import GRPOConfig, GRPOTrainer

from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.overrides import OF_ROWS, sees_rows
from grpo_math.trainer.trainer import MathGRPOTrainer

KINDS = {"trl": (GRPOTrainer, GRPOConfig), "ours": (MathGRPOTrainer, MathGRPOConfig)}
RUN = {**SMALL, "max_steps": 2}
EQUAL = {"advantage_eps": 1e-4}


def trained(kind, change, tiny, tokenizer, folder, **settings):
    """A trainer after two steps. ``change`` makes a subclass, or changes the trainer."""
    trainer_class, config_class = KINDS[kind]
    settings = {**RUN, **settings} | (EQUAL if kind == "ours" else {})
    subclass = change(trainer_class) if change in SUBCLASSES else trainer_class
    trainer = make(subclass, config_class, tiny("llama"), tokenizer, folder, letters, **settings)
    if change in REPLACEMENTS:
        change(trainer)
    trainer.train()
    return trainer


# What it changes


def reads_rows_in_the_loss(base):
    class Longer(base):
        def _compute_loss(self, model, inputs):
            longest = inputs["completion_ids"].size(1)
            return super()._compute_loss(model, inputs) * (1 + longest / 10)

    return Longer


def writes_rows_in_the_loss(base):
    class Stretched(base):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, {**inputs, "advantages": inputs["advantages"] ** 2 - 0.5})

    return Stretched


def writes_rows_before_the_loss(base):
    class Stretched(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            inputs["advantages"] = inputs["advantages"] ** 2 - 0.5
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    return Stretched


def has_a_loss_of_its_own(base):
    class Reinforce(base):
        def _compute_loss(self, model, inputs):
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            keep = inputs["completion_ids"].size(1)
            logps, entropies, _ = self._get_per_token_logps_and_entropies(model, ids, mask, keep, compute_entropy=True)
            per_token = -logps * inputs["advantages"][:, None] - 0.1 * entropies
            return (per_token * inputs["completion_mask"]).sum() / inputs["completion_mask"].sum()

    return Reinforce


def changes_rewards(base):
    class Squared(base):
        def _calculate_rewards(self, *args):
            return super()._calculate_rewards(*args) ** 2

    return Squared


def changes_the_rollout(base):
    class Weighted(base):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            output["advantages"] = output["advantages"] ** 2 - 0.5
            output["weights_of_rows"] = torch.arange(len(output["advantages"]))
            output["two_of_each"] = torch.ones(len(output["advantages"]), 2)
            return output

    return Weighted


def changes_log_probs(base):
    class Cooler(base):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            logps, *others = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            return logps * 0.5, *others

    return Cooler


def scores_by_itself(base):
    class Own(base):
        def _get_per_token_logps_and_entropies(
            self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **kwargs
        ):
            logits = torch.nn.functional.log_softmax(
                model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1], dim=-1
            )
            logps = logits.gather(2, input_ids[:, -logits_to_keep:, None])[:, :, 0]
            return logps * 0.5, -(logits.exp() * logits).sum(dim=-1) if compute_entropy else None, None

    return Own


def replaces_the_loss(trainer):
    plain = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: plain(model, {**inputs, "advantages": inputs["advantages"] * 3})


SUBCLASSES = (
    *(reads_rows_in_the_loss, writes_rows_in_the_loss, writes_rows_before_the_loss, has_a_loss_of_its_own),
    *(changes_rewards, changes_the_rollout, changes_log_probs, scores_by_itself),
)
REPLACEMENTS = (replaces_the_loss,)


@pytest.fixture(scope="module")
def unchanged(tiny, tokenizer, tmp_path_factory):
    return weights(trained("trl", None, tiny, tokenizer, tmp_path_factory.mktemp("unchanged")).model)


@pytest.mark.full(keep=["writes_rows_in_the_loss", "changes_rewards"])
@pytest.mark.parametrize("change", [*SUBCLASSES, *REPLACEMENTS], ids=lambda change: change.__name__)
def test_what_a_subclass_changes_trains_the_weights_that_it_does_with_trl(change, unchanged, tiny, tokenizer, tmp_path):
    ended = {kind: weights(trained(kind, change, tiny, tokenizer, tmp_path / kind).model) for kind in KINDS}
    assert relative(ended["ours"], ended["trl"]) < 1e-5
    assert relative(ended["ours"], unchanged) > 1e-5  # so the change is seen at all


@pytest.mark.full
def test_our_kl_term_takes_the_log_probs_that_a_subclass_gives(tiny, tokenizer, tmp_path):
    """An estimator of another name takes our way, and is k3 there."""
    settings = {**RUN, "beta": 0.5, "num_iterations": 2}
    theirs = trained("trl", changes_log_probs, tiny, tokenizer, tmp_path / "trl", **settings)
    ours = make(
        changes_log_probs(MathGRPOTrainer), MathGRPOConfig, tiny(), tokenizer, tmp_path, letters, **settings, **EQUAL
    )
    ours.settings.kl_estimator = "k3, our way"
    ours.train()
    assert relative(weights(ours.model), weights(theirs.model)) < 1e-5


# What it sees


def described(value: Any) -> Any:
    """A value without its numbers."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape)
    if isinstance(value, dict):
        return {name: described(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [described(item) for item in value[:2]]
    return type(value).__name__


OTHERS = (
    *(
        "_generate_and_score_completions",
        "_calculate_rewards",
        "_generate",
        "_generate_single_turn",
        "_save_checkpoint",
    ),
    *("_save", "save_model", "_get_grad_norm", "_tool_call_loop"),
)
WATCHED = {"all": (*OF_ROWS, *OTHERS), "others": OTHERS}


def watching(names, seen):
    """A subclass that notes what these methods get and give."""

    def subclass(base):
        def noting(name):
            def method(self, *args, **kwargs):
                result = getattr(super(Watching, self), name)(*args, **kwargs)
                given = [arg for arg in args if arg is not self.model and arg is not self.model_wrapped]
                seen.append((name, described(given), described(kwargs), described(result)))
                return result

            return method

        Watching = type("Watching", (base,), {name: noting(name) for name in names})
        return Watching

    return subclass


@pytest.mark.full
@pytest.mark.parametrize("watched", WATCHED)
def test_a_subclass_sees_what_it_sees_of_trl(watched, tiny, tokenizer, tmp_path, monkeypatch):
    noted = {}
    for kind in KINDS:
        seen = noted[kind] = []
        change = watching(WATCHED[watched], seen)
        monkeypatch.setattr(f"{__name__}.SUBCLASSES", (change,))
        settings = {"save_strategy": "steps", "save_steps": 1, "num_iterations": 2}
        trained(kind, change, tiny, tokenizer, tmp_path, **settings)
    for ours, trl in zip(noted["ours"], noted["trl"], strict=True):
        assert ours == trl


@pytest.mark.parametrize("method", OF_ROWS)
def test_one_line_says_why_updates_are_not_put_together(method, tiny, tokenizer, tmp_path, caplog):
    subclass = type("Told", (MathGRPOTrainer,), {method: lambda self, *args, **kwargs: None})
    trainer = make(subclass, MathGRPOConfig, tiny("llama"), tokenizer, tmp_path, letters, **RUN)
    assert not sees_rows(make(MathGRPOTrainer, MathGRPOConfig, tiny("llama"), tokenizer, tmp_path), MathGRPOTrainer)
    assert sees_rows(trainer, MathGRPOTrainer)
    lines = [record.message for record in caplog.records if "Told" in record.message]
    kept = "each update keeps TRL's rows, and only its prompts are shared."
    assert [line.removeprefix("[RANK 0] ") for line in lines] == [f"pack_updates: Told overrides {method}; {kept}"]
    assert trainer.scorer is not None

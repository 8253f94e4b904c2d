"""What grpo_math adds to TRL's trainer: one name, and no circle of imports."""

import ast
from dataclasses import fields
from inspect import getsource
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from small_trainers import KINDS, letters, relative, weights
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from grpo_math.algorithm.losses import LossSettings
from grpo_math.system import machine
from grpo_math.trainer import loss_settings, trainer_parts
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.run_files import RunFiles


def test_the_trainer_has_one_public_name_more_than_trls(ours):
    """Also once it has trained, so that a subclass may use any other name."""
    own, trls = (ours(folder=kind, max_steps=1, beta=0.1, **KINDS[kind]) for kind in ("ours", "trl"))
    for trainer in (own, trls):
        trainer.train()
    added = {*dir(own), *vars(own)} - {*dir(trls), *vars(trls)}
    # transformers 5.17's trainer has no annotations.
    assert added - {"__annotations__"} == {"grpo_math", "_evaluate_failed_step", "_saves_whole_model"}
    own.remove_callback(RunFiles)


def test_a_trainer_on_a_cpu_uses_the_physical_cores(ours, monkeypatch):
    before, cores = torch.get_num_threads(), machine.physical_cores()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(cores + 1)
    try:
        ours()
        assert torch.get_num_threads() == cores
    finally:
        torch.set_num_threads(before)


def imported(path):
    """The files of trainer/ that one imports, also for its annotations alone."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("grpo_math.trainer"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ({name.split(".")[2] for name in names} if names else ())


def test_no_file_of_the_trainer_imports_itself_through_others():
    folder = Path(trainer_parts.__file__).parent
    edges = {path.stem: set(imported(path)) for path in folder.glob("[a-z]*.py")}
    while leaves := [name for name, others in edges.items() if not others & {*edges}]:
        for name in leaves:
            del edges[name]
    assert edges == {}


def test_the_settings_of_the_loss_are_those_that_trl_reads_and_ours():
    source, arguments = getsource(GRPOTrainer._compute_loss), loss_settings.TRL_FIELDS - loss_settings.OWN_FIELDS
    rollout = getsource(GRPOTrainer._generate_and_score_completions)
    for name in loss_settings.ATTRIBUTES:
        assert f"self.{name}" in source + rollout, name
    for name in arguments:
        assert f"self.args.{name}" in source, name
    assert {*arguments} <= {field.name for field in fields(GRPOConfig)}
    # A default is the config's, so that a test of the loss alone is a test of training.
    defaults = {field.name: field.default for field in fields(MathGRPOConfig)}
    others = {"epsilon_low": "epsilon"}
    computed = {*loss_settings.COMPUTED, "epsilon_high"}  # None in the config: that of epsilon
    for field in fields(LossSettings):
        if field.name not in {*computed, "router_aux_loss_coef"}:  # None: that of the model
            assert field.default == defaults[others.get(field.name, field.name)], field.name


class Changes(TrainerCallback):
    """Sets attributes of a trainer when its second step begins."""

    def __init__(self, values):
        self.values = values

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            for name, value in self.values.items():
                setattr(
                    self.trainer.args if hasattr(args, name) and not hasattr(self.trainer, name) else self.trainer,
                    name,
                    value,
                )


def one_group(completions, **columns):
    """The first group has no advantage: only a KL term needs its completions."""
    return [1.0] * 4 + letters(completions)[4:]


CHANGES = {
    "no KL": ({"beta": 0.0}, {"beta": 0.5}),
    **{kind: ({"loss_type": kind}, {}) for kind in ("grpo", "bnpo", "dr_grpo", "sapo")},
    "clip range": ({"epsilon_low": 0.0, "epsilon_high": 0.0}, {"num_iterations": 1}),
    "two-sided clip": ({"delta": 1.0}, {}),
    "sequence ratios": ({"importance_sampling_level": "sequence"}, {}),
    "quantile": ({"top_entropy_quantile": 0.5}, {}),
    "entropy": ({"entropy_coef": 0.5}, {"entropy_coef": 0.01}),
    "off-policy mask": ({"off_policy_mask_threshold": 0.0}, {}),
    "scale": ({"scale_rewards": "none"}, {}),
    "aggregation": ({"multi_objective_aggregation": "normalize_then_sum"}, {}),
    "truncation": ({"mask_truncated_completions": True}, {}),
    "limit": ({"max_completion_length": 5}, {"loss_type": "dr_grpo"}),
    "weights": ({"reward_weights": None}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_an_attribute_that_a_callback_changes_counts_from_the_next_step_as_with_trl(change, ours):
    values, settings = CHANGES[change]
    ends = []
    for kind in ("ours", "trl"):
        trainer = ours(one_group, folder=kind, max_steps=3, **KINDS[kind], **settings)
        if "reward_weights" in values:
            values = {"reward_weights": trainer.reward_weights * 3}
        trainer.add_callback(callback := Changes(values))
        callback.trainer = trainer
        trainer.train()
        ends.append(weights(trainer.model))
    assert relative(*ends) < 1e-5


def test_a_kl_term_that_a_callback_switches_on_counts_completions_without_advantage(ours):
    logged = []
    for beta in (0.0, 1e-30):  # with a first beta that is not 0, no completion is skipped
        adapter = LoraConfig(r=4, target_modules="all-linear")
        trainer = ours(one_group, folder=str(beta), max_steps=3, beta=beta, peft_config=adapter, learning_rate=1.0)
        trainer.add_callback(callback := Changes({"beta": 5.0}))
        callback.trainer = trainer
        trainer.train()
        logged.append(trainer.grpo_math.updates.result.metrics["kl"])
    assert logged[0] == pytest.approx(logged[1], rel=1e-3)

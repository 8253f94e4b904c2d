"""Every two options together: either one line before weights load that names both, or read by the training step.

The settings that a pair needs in order to mean anything (``beta`` for an estimator of the KL, ``use_adaptive_entropy``
for its bounds) are options of their own here, so that each is also tried without what it needs.
"""

from __future__ import annotations

import itertools
import math
import random

import pytest
from datasets import Dataset

from grpo_math.errors import ConfigError
from grpo_math.settings.fields import fields
from grpo_math.settings.rules import OF_TRAINER, violations
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer

VALUES = {
    "baseline": ["leave_one_out", "none"],
    "surrogate": ["reinforce"],
    "advantage_eps": [1e-2],
    "kl_estimator": ["k1", "k2"],
    "reference_refresh_steps": [2],
    "resample_groups": [1],
    "pack_updates": [False],
    "update_token_budget": [64],
    "max_seq_length_train": [12],
    "long_sequences": ["mask"],
    "longest_first": [True],
    "vllm_sync": ["merged"],
    "staleness": [1],
    "loss_type": ["grpo", "bnpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo"],
    "scale_rewards": ["batch", "none", False],
    "importance_sampling_level": ["sequence"],
    "multi_objective_aggregation": ["normalize_then_sum"],
    "beta": [0.1],
    "use_bias_correction_kl": [False],
    "sync_ref_model": [True],
    "ref_model_mixup_alpha": [0.5],
    "ref_model_sync_steps": [1],
    "num_iterations": [2],
    "steps_per_generation": [2],
    "gradient_accumulation_steps": [2],
    "epsilon": [0.1],
    "epsilon_high": [1.3],
    "delta": [2.0],
    "off_policy_mask_threshold": [0.5],
    "top_entropy_quantile": [0.5, 0.0],
    "entropy_coef": [0.01],
    "use_adaptive_entropy": [True],
    "entropy_target": [5.0],
    "sapo_temperature_pos": [2.0],
    "vespo_k_neg": [2.0],
    "mask_truncated_completions": [True],
    "gradient_checkpointing": [True],
}
SINGLES = [{name: value} for name, values in VALUES.items() for value in values]
PAIRS = [a | b for a, b in itertools.combinations(SINGLES, 2) if a.keys() != b.keys()]
SETTINGS = [{}, *SINGLES, *PAIRS]

# Refused with a field that is at its default: the option needs the other one.
NEEDS = {
    "vllm_sync": {"use_vllm"},
    "staleness": {"use_vllm"},
    "kl_estimator": {"beta"},
    "use_bias_correction_kl": {"beta"},
    "sync_ref_model": {"beta"},
    "reference_refresh_steps": {"beta"},
    "ref_model_mixup_alpha": {"sync_ref_model"},
    "ref_model_sync_steps": {"sync_ref_model"},
    "long_sequences": {"max_seq_length_train"},
    "entropy_target": {"use_adaptive_entropy"},
    "sapo_temperature_pos": {"loss_type"},
    "vespo_k_neg": {"loss_type"},
    "loss_type": {"importance_sampling_level", "epsilon_high"},  # luspo, cispo
}


def config(folder, setting):
    base = {
        "use_cpu": True,
        "bf16": False,
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 4,
        "learning_rate": 1e-3,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "logging_steps": 1,
    }
    return MathGRPOConfig(str(folder), **{**base, **setting})


DEFAULTS = {name: field.default for name, field in fields().items()} | {"gradient_checkpointing": False}


def refusal(setting) -> ConfigError | None:
    """Return the first error or warning."""
    return next((line for _, line in violations(DEFAULTS | setting, OF_TRAINER)), None)


REFUSALS = {str(setting): refusal(setting) for setting in SETTINGS}
ALLOWED = [setting for setting in SETTINGS if REFUSALS[str(setting)] is None]


def test_a_refusal_is_one_line_that_names_a_field_of_the_setting_and_the_one_that_it_cannot_work_with():
    for setting in SETTINGS:
        error = REFUSALS[str(setting)]
        if error is None:
            continue
        text = str(error)
        assert "\n" not in text, text
        assert error.field in setting, (setting, text)
        others = (set(setting) - {error.field}) | NEEDS.get(error.field, set())
        assert any(other in text for other in others), (setting, text)


# Worked out by hand from what each loss reads.
@pytest.mark.parametrize(
    ("pair", "allowed"),
    [
        ({"kl_estimator": "k1", "beta": 0.1}, True),
        ({"baseline": "none", "scale_rewards": "none"}, True),
        ({"baseline": "none", "scale_rewards": False}, True),
        ({"baseline": "none", "scale_rewards": "batch"}, True),
        ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, True),
        ({"loss_type": "luspo", "surrogate": "reinforce"}, True),
        ({"loss_type": "cispo", "surrogate": "reinforce"}, False),
        ({"loss_type": "sapo", "surrogate": "reinforce"}, False),
        ({"loss_type": "vespo", "surrogate": "reinforce"}, False),
        ({"loss_type": "dr_grpo", "surrogate": "reinforce"}, True),
        ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, False),
        ({"loss_type": "cispo", "epsilon_high": 1.3}, True),
        ({"loss_type": "cispo", "delta": 2.0}, False),
        ({"loss_type": "sapo", "epsilon": 0.1}, False),
        ({"loss_type": "sapo", "sapo_temperature_pos": 2.0}, True),
        ({"epsilon": 0.1, "delta": 2.0}, True),
        ({"surrogate": "reinforce", "num_iterations": 2}, True),
        ({"surrogate": "reinforce", "delta": 2.0}, False),
        ({"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "batch"}, False),
        ({"sync_ref_model": True, "beta": 0.1}, True),
        ({"use_adaptive_entropy": True, "entropy_target": 5.0}, True),
    ],
)
def test_what_is_allowed_and_what_is_not(pair, allowed):
    assert (refusal(pair) is None) == allowed


# Each option at least once, in pairs drawn by a fixed seed.
def sample() -> list[dict]:
    pairs = [pair for pair in ALLOWED if len(pair) == 2]
    random.Random(0).shuffle(pairs)
    drawn, seen = [], set()
    for pair in pairs:
        new = {str(item) for item in pair.items()} - seen
        if new:
            drawn.append(pair)
            seen |= new
    return drawn


@pytest.mark.full
@pytest.mark.parametrize("setting", sample(), ids=str)
def test_what_is_allowed_trains_a_step(setting, tiny, tokenizer, tmp_path):
    def letters(completions, **columns):
        return [float(sum(map(ord, text)) % 7) for text in completions]

    trainer = MathGRPOTrainer(
        model=tiny(),
        reward_funcs=letters,
        args=config(tmp_path, setting),
        train_dataset=Dataset.from_list([{"prompt": prompt, "answer": "7"} for prompt in ("x", "What is 3 + 4?") * 4]),
        processing_class=tokenizer,
    )
    trainer.train()
    assert math.isfinite(float(trainer.state.log_history[0]["loss"]))

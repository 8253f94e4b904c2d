"""The table of rules: settings that break each one, or just do not, worked out by hand."""

import pytest

from grpo_math.errors import ConfigError
from grpo_math.settings.fields import fields
from grpo_math.settings.rules import RULES, TRAINER_RULES, named, violations
from grpo_math.settings.run_settings import RunSettings
from grpo_math.trainer.config import MathGRPOConfig

DEFAULTS = RunSettings({"output_dir": "run"})
LORA = {"use_peft": True, "learning_rate": 5e-6}
ON_SERVER = {"use_vllm": True, "vllm_mode": "server"}
PREFETCH = {**LORA, **ON_SERVER, "vllm_sync": "adapter", "vllm_server_base_url": "http://h:1", "staleness": 1}
SHARED = {**LORA, "use_vllm": True, "vllm_mode": "colocate", "vllm_sync": "adapter", "vllm_share_weights": True}
TEACHER = {"reference_model": "a", "beta": 1.0}
MODEL_KEYS = ("dtype", "torch_dtype", "attn_implementation", "trust_remote_code", "revision", "quantization_config")
GENERATION_KEYS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "cache_implementation", "max_new_tokens"),
    *("max_length", "max_tokens", "num_return_sequences", "n"),
)
TWO_REWARDS = {"multi_objective_aggregation": "normalize_then_sum", "rewards": ["accuracy", "overlong"]}


def test_each_word_of_a_rule_names_a_setting():
    assert [word for rule in RULES for word in rule.fields.split() if not named(word)] == []


def test_settings_share_no_list_of_the_defaults():
    RunSettings({}).rewards.append("format")
    assert RunSettings({}).rewards == ["accuracy"]


class Recorder:
    """Settings that remember which of them are read."""

    def __init__(self, settings: RunSettings) -> None:
        self.settings, self.names = settings, set()

    def __getattr__(self, name):
        self.names.add(name)
        found = getattr(RunSettings, name, None)
        return found.fget(self) if isinstance(found, property) else getattr(self.settings, name)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.level != "no_effect"], ids=lambda rule: rule.fields)
def test_the_condition_of_an_error_or_a_warning_reads_a_field_at_fault(rule):
    rows = [DEFAULTS.changed(**row) for level in BROKEN.values() for row, _ in level]
    recorders = [Recorder(row) for row in rows if rule.when(row)]
    for recorder in recorders:
        rule.when(recorder)
        assert recorder.names & {*named(rule.fields)}


def test_the_defaults_break_no_rule_and_neither_does_null():
    assert not [*violations(DEFAULTS)]
    for name, field in fields().items():
        if "None" in field.kinds:
            list(violations(DEFAULTS.changed(**{name: None})))


@pytest.mark.parametrize(
    "changed",
    [
        {"vllm_server_base_url": "http://ada:se/cret@host:80"},
        {"reference_model": "http://ada:se/cret@host:80", "beta": 1.0},
        {"model_init_kwargs": {"token": "hf_cret", **dict.fromkeys(MODEL_KEYS, 1)}},
    ],
)
def test_the_line_of_a_rule_shows_no_secret(changed):
    lines = [str(line) for _, line in violations(DEFAULTS.changed(**changed))]
    assert lines
    assert "cret" not in "".join(lines)


# From what each loss reads.
PAIRS = [
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
    ({"loss_type": "vespo", "vespo_k_pos": 3.0}, True),
    ({"vespo_k_pos": 3.0}, False),
    ({"epsilon": 0.1, "delta": 2.0}, True),
    ({"epsilon": 0.5, "delta": 1.5}, False),  # 1 + epsilon
    ({"epsilon": 0.5, "epsilon_high": 0.25, "delta": 1.375}, True),
    ({"surrogate": "reinforce", "num_iterations": 2}, True),
    ({"surrogate": "reinforce", "delta": 2.0}, False),
    ({"scale_rewards": "mean"}, True),
    ({"scale_rewards": "mean", "baseline": "none"}, False),
    ({"scale_rewards": "mean", "baseline": "a:b"}, False),
    ({"baseline": "pass_at_k"}, True),
    ({"baseline": "pass_at_k", "k": 7}, True),
    ({"baseline": "pass_at_k", "k": 8}, False),  # of 8 completions
    ({"baseline": "pass_at_k", "k": 9}, False),
    ({"baseline": "pass_at_k", "k": 3, "train_completions": 4}, True),
    ({"baseline": "pass_at_k", "k": 4, "train_completions": 4}, False),
    ({"train_completions": 2}, True),
    ({"train_completions": 8}, True),  # of 8 completions
    ({"train_completions": 1}, False),
    ({"train_completions": 9}, False),
    ({"train_completions": 4, "loss_type": "bnpo"}, False),
    ({"baseline": "pass_at_k", "scale_rewards": "none"}, False),
    ({"baseline": "pass_at_k", "rewards": ["gsm8k"]}, False),
    ({"baseline": "nsr"}, True),
    ({"baseline": "w_reinforce", "scale_rewards": "none"}, False),
    ({"baseline": "nsr", "rewards": ["gsm8k"]}, False),
    ({"baseline": "length_weighted", "scale_rewards": "mean"}, False),
    ({"baseline": "quantile"}, True),
    ({"baseline": "pass_at_k", "reward_weights": [2.0]}, False),
    ({"k": 2}, False),
    ({"surrogate": "dppo", "loss_type": "prompt_mean"}, True),
    ({"surrogate": "dppo", "loss_type": "cispo"}, False),
    ({"surrogate": "dppo", "epsilon_high": 0.3}, False),
    ({"surrogate": "dppo", "importance_sampling_level": "sequence"}, False),
    ({"surrogate": "dppo", "dppo_high": 0.1}, True),
    ({"dppo_high": 0.1}, False),
    ({"surrogate": "reinforce", "loss_type": "prompt_mean"}, True),
    ({"surrogate": "cispo", "loss_type": "prompt_mean", "epsilon_high": 5.0}, True),
    ({"surrogate": "cispo", "loss_type": "cispo", "epsilon_high": 5.0}, True),
    ({"surrogate": "cispo", "epsilon_high": 5.0, "epsilon": 0.1}, False),
    ({"surrogate": "cispo"}, False),
    ({"surrogate": "sapo", "loss_type": "cispo"}, False),
    ({"surrogate": "sapo", "sapo_temperature_pos": 2.0, "importance_sampling_level": "sequence"}, True),
    ({"surrogate": "gmpo", "loss_type": "luspo", "epsilon": 0.4}, True),
    ({"surrogate": "gmpo", "delta": 2.0}, False),
    ({"surrogate": "gmpo", "importance_sampling_level": "sequence"}, False),
    ({"surrogate": "dppo_kl", "dppo_low": 0.05}, True),
    ({"surrogate": "vespo", "loss_type": "grpo", "vespo_k_pos": 3.0}, True),
    (ON_SERVER | {"surrogate": "vespo"}, False),
    (ON_SERVER | {"vllm_importance_sampling_mode": "geometric_mask", "geometric_mask_low": 0.9}, True),
    (ON_SERVER | {"vllm_importance_sampling_mode": "geometric_mask", "surrogate": "vespo"}, False),
    (ON_SERVER | {"vllm_importance_sampling_mode": "geometric_mask", "surrogate": "dppo"}, False),
    (ON_SERVER | {"geometric_mask_low": 0.9}, False),
    ({"reference_model": "a", "beta": 1.0}, True),
    ({"reference_model": "a", "beta": 1.0, "rewards": []}, True),
    ({"reference_model": "a", "beta": 1.0, "rewards": [], "resample_groups": 1}, False),
    ({"reference_model": "a", "beta": 1.0, "reference_refresh_steps": 8}, False),
    ({"reference_model": "a"}, False),
    ({"rewards": []}, False),
    ({"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "batch"}, False),
    ({"multi_objective_aggregation": "normalize_then_sum"}, False),  # one reward
    ({"multi_objective_aggregation": "normalize_then_sum", "rewards": ["accuracy", "overlong"]}, True),
    ({"kl_estimator": "k2", "use_bias_correction_kl": False}, True),  # for a beta of yours
    ({"kl_estimator": "k2"}, False),
    ({"sync_ref_model": True, "beta": 0.1}, True),
    ({"use_adaptive_entropy": True, "entropy_target": 5.0}, True),
    ({"optim": "galore_adamw_layerwise"}, False),
    ({"optim": "adalomo"}, False),
    ({"optim": "lomo", "pack_updates": False}, True),
    ({"optim": "galore_adamw"}, True),
    ({"reward_weights": [1.0]}, True),  # for the reward accuracy
    ({"reward_weights": [1.0, 2.0]}, False),
    ({"reward_weights": [0.0]}, False),
    ({"reward_weights": [0.0], "beta": 0.1}, True),
    (ON_SERVER | {"vllm_importance_sampling_clip_max": 1.0}, True),
    (ON_SERVER | {"vllm_importance_sampling_clip_max": 0.9}, False),
    (ON_SERVER | {"vllm_importance_sampling_clip_min": 1.1}, False),
    (ON_SERVER | {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 0.9}, True),
    ({"generation_kwargs": {"do_sample": True, "num_beams": 1}}, True),
    ({"generation_kwargs": {"num_beams": 2}}, False),
    ({"accelerator_config": {"even_batches": True}}, True),
    ({"accelerator_config": {"dispatch_batches": True}}, False),
    ({"heldout_every": 0, "save_strategy": "no"}, True),
    ({"heldout_every": 0, "save_strategy": "epoch"}, True),
    ({"heldout_every": 0, "save_strategy": "best"}, False),
    ({"heldout_every": 5, "save_strategy": "best", "keep_best": True}, True),
    ({"heldout_every": 5, "load_best_model_at_end": True}, True),
    ({"heldout_every": 0, "load_best_model_at_end": True}, False),
    ({"eval_strategy": "epoch", "heldout": ["x"]}, True),
    ({"heldout_every": 0, "eval_strategy": "steps", "eval_steps": 5}, True),
    ({"heldout_every": 0, "eval_strategy": "steps"}, False),
    ({"heldout_every": 5, "eval_strategy": "steps", "eval_steps": 5}, False),
    ({"heldout_every": 0, "eval_n": 1, "eval_dataset": "x"}, True),
    ({"heldout_every": 0, "eval_n": 0, "eval_dataset": "x"}, False),
    ({"reference_refresh_steps": 5, "beta": 0.1}, True),
    ({"reference_refresh_steps": 5, "beta": 0.1, "fsdp": "full_shard"}, False),
    ({**ON_SERVER, "loss_type": "vespo", "vllm_importance_sampling_mode": "token_mask"}, True),
    ({**ON_SERVER, "loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask"}, False),
    ({**ON_SERVER, "vllm_server_base_url": "http://h:1", "vllm_server_host": "g"}, False),
    ({**ON_SERVER, "vllm_server_base_url": "http://h:1", "vllm_server_port": 2}, False),
    # As the launcher adds the address of the server that it has started for these two.
    (
        {**ON_SERVER, "vllm_server_base_url": "http://127.0.0.1:2"}
        | {"vllm_server_host": "localhost", "vllm_server_port": 2},
        True,
    ),
    ({"dataset": "rows.jsonl", "dataset_split": "train[:9]"}, True),
    ({"dataset": "rows.jsonl", "dataset_split": "test"}, False),
    ({"heldout_every": 5, "eval_steps": 7}, False),
    ({"eval_strategy": "epoch", "eval_steps": 7}, False),
    ({"eval_columns": "problem=x"}, False),
    ({"eval_columns": "problem=x", "eval_dataset": "rows.jsonl"}, True),
    ({"max_steps": 8, "logging_steps": 8}, True),
    ({"max_steps": 8, "logging_steps": 9}, False),
    ({"max_steps": 8, "warmup_steps": 7}, True),
    ({"max_steps": 8, "warmup_steps": 8}, False),
    ({"max_steps": 8, "warmup_steps": 8, "lr_scheduler_type": "constant"}, True),
    ({"push_to_hub": True, "hub_strategy": "end"}, True),
    ({"surrogate": "a:b", "top_entropy_quantile": 0.5, "off_policy_mask_threshold": 0.5}, True),
    ({"surrogate": "reinforce", "off_policy_mask_threshold": 0.5}, False),
    (ON_SERVER | {"surrogate": "reinforce", "off_policy_mask_threshold": 0.5}, True),  # far from the sampler
    ({"dtype": "float16"}, False),
    (LORA | {"dtype": "float16"}, True),
    (LORA | {"dtype": "float16", "bf16": False}, False),
    (LORA | {"dtype": "float16", "bf16": False, "fp16": True}, True),
    ({"fp16": True, "use_transformers_continuous_batching": True}, False),
    (LORA, True),
    (LORA | {"learning_rate": 4.9e-6}, False),
    (LORA | {"lora_alpha": 128}, True),  # 8 times the rank of 16
    (LORA | {"lora_alpha": 129}, False),
    (LORA | {"lora_r": 1, "lora_alpha": 32}, True),
    (LORA | {"lora_r": 5, "lora_alpha": 41}, False),
    ({"learning_rate": 1e-5}, True),
    ({"learning_rate": 1.1e-5}, False),
    ({"learning_rate": 1.1e-5, "optim": "sgd"}, True),
    (LORA | {"lora_dropout": 0.0, "beta": 0.1}, True),
    (LORA | {"lora_target_modules": [".*q_proj"]}, True),
    (LORA | {"lora_target_modules": ["q_(proj"]}, False),
    (LORA | {"lora_target_modules": ["q_(proj", "v_proj"]}, True),  # names, not expressions
    (LORA | {"load_in_4bit": True, "use_dora": True}, True),
    (LORA | ON_SERVER | {"vllm_sync": "adapter", "lora_r": 512}, True),
    (LORA | ON_SERVER | {"vllm_sync": "adapter", "lora_r": 513}, False),
    (LORA | ON_SERVER | {"vllm_sync": "merged", "lora_r": 513, "use_dora": True}, True),
    (LORA | ON_SERVER | {"vllm_sync": "adapter", "vllm_server_base_url": "http://h:1", "staleness": 1}, True),
    (LORA | ON_SERVER | {"vllm_sync": "adapter", "vllm_mode": "colocate", "staleness": 1}, False),
]
# Settings that break one rule, by the level of its line and the field that the line names.
BROKEN = {
    "error": [
        (TWO_REWARDS | {"resample_groups": 1}, "resample_groups"),
        ({"activation_offloading": True, "gradient_checkpointing": False}, "activation_offloading"),
        ({"fp16": True, "use_cpu": True}, "fp16"),
        ({"sync_ref_model": True}, "sync_ref_model"),
        (LORA | {"sync_ref_model": True, "beta": 0.1, "lora_dropout": 0.0}, "sync_ref_model"),
        ({"reference_refresh_steps": 8}, "reference_refresh_steps"),
        ({"reference_refresh_steps": 8, "sync_ref_model": True, "beta": 0.1}, "reference_refresh_steps"),
        (TEACHER | {"cast_lm_head_to_fp32": True}, "reference_model"),
        (TEACHER | {"fsdp": "full_shard"}, "reference_model"),
        (TEACHER | {"reference_model": "http://a:1"}, "reference_model"),
        (ON_SERVER | {"vllm_server_base_url": "http://a:1,http://b:1"}, "vllm_server_base_url"),
        (PREFETCH | {"vllm_sync": "merged"}, "staleness"),
        (PREFETCH | {"vllm_importance_sampling_correction": False}, "staleness"),
        (PREFETCH | {"use_peft": False}, "staleness"),
        (SHARED | {"use_peft": False}, "vllm_share_weights"),
        (LORA | ON_SERVER | {"vllm_share_weights": True}, "vllm_share_weights"),
        (SHARED | {"vllm_sync": "merged"}, "vllm_share_weights"),
        (SHARED | {"vllm_tensor_parallel_size": 2}, "vllm_share_weights"),
        (SHARED | {"cast_lm_head_to_fp32": True}, "vllm_share_weights"),
        (SHARED | {"load_in_8bit": True}, "vllm_share_weights"),
        (SHARED | {"adapter": "sft"}, "vllm_share_weights"),
        (SHARED | {"load_in_4bit": True}, "use_bnb_nested_quant"),
        *(({"model_init_kwargs": {name: 1}}, "model_init_kwargs") for name in MODEL_KEYS),
        *(({"generation_kwargs": {name: 1}}, "generation_kwargs") for name in GENERATION_KEYS),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"remove_unused_columns": True}, "remove_unused_columns"),
        ({"logging_strategy": "no"}, "logging_strategy"),
        ({"ignore_data_skip": True}, "ignore_data_skip"),
        ({"output_dir": ""}, "output_dir"),
        ({"rewards": ["accuracy", "accuracy"]}, "rewards"),
        (LORA | ON_SERVER | {"lora_modules_to_save": ["lm_head"]}, "lora_modules_to_save"),
        ({"load_in_4bit": True}, "load_in_4bit"),
    ],
    "warning": [
        ({"keep_best": True, "heldout_every": 0}, "keep_best"),
        ({"keep_best": True, "heldout_every": 5, "save_strategy": "no"}, "keep_best"),
        ({"scale_rewards": "mean", "advantage_eps": 0.1}, "advantage_eps"),
        ({"baseline": "pass_at_k", "advantage_eps": 0.1}, "advantage_eps"),
        ({"entropy_coef": 0.1, "max_tokens_per_micro_batch": 99}, "max_tokens_per_micro_batch"),
        ({"surrogate": "dppo_kl", "delta": 2.0}, "delta"),
        ({"surrogate": "vespo", "delta": 2.0}, "delta"),
        ({"surrogate": "a:b", "delta": 2.0}, "delta"),
        ({"entropy_target": 2.0}, "entropy_target"),
        ({"loss_type": "luspo"}, "loss_type"),
        ({"torch_compile": True}, "torch_compile"),
        ({"kl_estimator": "advantage", "beta": 0.1, "use_bias_correction_kl": False}, "use_bias_correction_kl"),
        ({"ref_model_mixup_alpha": 0.1}, "ref_model_mixup_alpha"),
        ({"vllm_enable_sleep_mode": True}, "vllm_enable_sleep_mode"),
        ({"vllm_server_timeout": 9.0}, "vllm_server_timeout"),
        ({"use_vllm": True, "vllm_server_base_url": "http://a:1"}, "vllm_server_base_url"),
        (ON_SERVER | {"vllm_enable_sleep_mode": True}, "vllm_enable_sleep_mode"),
        (
            ON_SERVER | {"vllm_importance_sampling_correction": False, "vllm_importance_sampling_clip_max": 9.0},
            "vllm_importance_sampling_clip_max",
        ),
        (ON_SERVER | {"min_p": 0.1}, "min_p"),
        (ON_SERVER | {"generation_kwargs": {"presence_penalty": 1}}, "generation_kwargs"),
        ({"heldout": ["x"]}, "heldout"),
        ({"lora_r": 8}, "lora_r"),
        ({"bnb_4bit_quant_storage": "uint8"}, "bnb_4bit_quant_storage"),
        (LORA | {"beta": 0.1}, "lora_dropout"),
        ({"save_only_model": True}, "save_only_model"),
        ({"max_steps": 8, "num_train_epochs": 2.0}, "num_train_epochs"),
        ({"save_strategy": "no", "save_steps": 9}, "save_steps"),
        ({"log_completions": False, "log_unique_prompts": True}, "log_unique_prompts"),
        ({"hub_model_id": "x"}, "hub_model_id"),
        ({"push_to_hub": True, "hub_strategy": "checkpoint"}, "hub_strategy"),
        ({"liger_kernel_config": {"x": 1}}, "liger_kernel_config"),
    ],
}


@pytest.mark.parametrize(("pair", "allowed"), PAIRS)
def test_what_is_allowed_and_what_is_not(pair, allowed):
    assert (not [*violations(DEFAULTS.changed(**pair))]) == allowed


@pytest.mark.parametrize(
    ("level", "settings", "field"), [(level, *case) for level, cases in BROKEN.items() for case in cases]
)
def test_a_broken_rule_gives_one_line_that_names_the_field_at_fault(level, settings, field):
    [(found, line)] = violations(DEFAULTS.changed(**settings))
    assert (found, line.field, line.value) == (level, field, getattr(DEFAULTS.changed(**settings), field))
    assert "\n" not in str(line)


def test_each_rule_is_broken_by_a_row_and_those_of_the_trainer_read_only_its_fields():
    rows = [DEFAULTS.changed(**row) for row, _ in PAIRS + BROKEN["error"] + BROKEN["warning"]]
    assert [rule for rule in RULES if not any([*violations(row, [rule])] for row in rows)] == []
    for row in rows:
        config = object.__new__(MathGRPOConfig)
        vars(config).update({name: getattr(row, name) for name in MathGRPOConfig.__dataclass_fields__})
        list(violations(config, TRAINER_RULES))


def test_a_config_of_a_script_raises_errors_logs_warnings_and_checks_each_field(tmp_path, caplog):
    given = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    MathGRPOConfig(**given)
    assert not caplog.messages
    MathGRPOConfig(**given, surrogate="reinforce", epsilon=0.1, epsilon_high=0.3)
    assert caplog.messages == [
        "epsilon=0.1 (and epsilon_high) has no effect: the surrogate reinforce does not read it: leave it out"
    ]
    caplog.clear()
    MathGRPOConfig(**given, learning_rate=3.0, save_total_limit=0, log_level="WARNING")
    assert caplog.messages == [
        "learning_rate=3.0 is out of range: give a number above 0 and up to 1",
        "save_total_limit=0 is out of range: give a number of 1 or more",
    ]
    for name, value in {"temperature": 0, "loss_type": "cispo", "kl_estimator": "k4", "num_generations": 1}.items():
        with pytest.raises(ConfigError, match=f"{name}="):
            MathGRPOConfig(**given | {"surrogate": "reinforce", name: value})

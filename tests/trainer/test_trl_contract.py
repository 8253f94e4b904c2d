"""What this package relies on in TRL: a new TRL fails here, with the name of what moved."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import transformers.trainer
import trl
from small_trainers import KINDS, letters
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

import grpo_math.trainer.trainer
from grpo_math.algorithm import losses
from grpo_math.errors import UserError
from grpo_math.generation.sync import AdapterGeneration
from grpo_math.trainer import loss_settings, state, updates
from grpo_math.trainer.config import TRL_EQUAL, MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer

SIGNATURES = {
    "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
    "_generate_and_score_completions": ["self", "inputs"],
    "_generate_single_turn": [
        "self",
        "prompt_ids",
        "images",
        "multimodal_fields",
        "num_generations",
        "has_tool_images",
    ],
    "_tool_call_loop": [
        *("self", "prompts", "prompt_ids", "completion_ids", "completions", "logprobs", "images", "multimodal_fields")
    ],
    "_compute_loss": ["self", "model", "inputs"],
    "_prepare_inputs": ["self", "generation_batch"],
    "training_step": ["self", "model", "inputs", "num_items_in_batch"],
    "_get_grad_norm": ["self", "model", "grad_norm"],
    "_run_epoch": [
        *("self", "model", "epoch", "train_dataloader", "steps_in_epoch", "num_update_steps_per_epoch", "trial"),
        *("ignore_keys_for_eval", "start_time", "resume_from_checkpoint", "epochs_trained"),
        "steps_trained_in_current_epoch",
    ],
    "_load_rng_state": ["self", "checkpoint"],
    "_get_train_sampler": ["self", "dataset"],
    "_log_metric": ["self", "name", "value"],
    "evaluate": ["self", "eval_dataset", "ignore_keys", "metric_key_prefix"],
    "_determine_best_metric": ["self", "metrics", "trial"],
    "_load_best_model": ["self"],
    "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
    "train": ["self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
    "_save": ["self", "output_dir", "state_dict"],
    "_push_from_checkpoint": ["self", "checkpoint_folder"],
    # transformers 5.17 has no "private". Ours passes every argument on.
    "push_to_hub": ["self", "commit_message", "blocking", "token", "revision"],
    "_save_checkpoint": ["self", "model", "trial"],
    "_maybe_log_save_evaluate": [
        *("self", "tr_loss", "grad_norm", "model", "trial", "epoch", "ignore_keys_for_eval", "start_time"),
        "learning_rate",
    ],
    "_save_optimizer_and_scheduler": ["self", "output_dir"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
    "create_scheduler": ["self", "num_training_steps", "optimizer"],
    "log": ["self", "logs", "start_time"],
}
SCORING = [
    "self",
    "model",
    "input_ids",
    "attention_mask",
    "logits_to_keep",
    "batch_size",
    "compute_entropy",
    "compute_aux_loss",
]


def parameters(method) -> list[str]:
    return list(inspect.signature(method).parameters)


def test_the_version_is_the_one_that_this_was_written_against():
    assert trl.__version__.startswith("1.16.")


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_overridden_methods_have_the_signatures_that_we_override(name):
    has = parameters(getattr(GRPOTrainer, name))
    assert (has[:5] if name == "push_to_hub" else has) == SIGNATURES[name]


@pytest.mark.parametrize("kind", [GRPOTrainer, MathGRPOTrainer])
def test_the_methods_that_users_and_trl_call_begin_alike(kind):
    assert parameters(kind._get_per_token_logps_and_entropies)[: len(SCORING)] == SCORING
    # All of them by name, for `help(MathGRPOTrainer)`.
    assert parameters(kind.__init__) == parameters(GRPOTrainer.__init__)


def test_nothing_else_of_trl_is_overridden():
    ours = {name for name, value in vars(MathGRPOTrainer).items() if inspect.isfunction(value)}
    overridden = {name for name in ours if hasattr(GRPOTrainer, name)}
    assert overridden == {*SIGNATURES, "__init__", "_get_per_token_logps_and_entropies"}


def test_vllm_generation_is_what_the_adapter_sync_stands_in_for():
    ours = {name for name in vars(AdapterGeneration) if hasattr(VLLMGeneration, name) and not name.startswith("__")}
    assert ours == {"_init_vllm", "sync_weights", "generate"}
    assert parameters(VLLMGeneration._init_vllm) == parameters(VLLMGeneration.sync_weights) == ["self"]
    assert parameters(VLLMGeneration.generate) == parameters(AdapterGeneration.generate)


# Attributes of TRL's trainer that this package reads. Those of its generation by vLLM: tests/generation.
ATTRIBUTES = [
    *("beta", "ref_model", "aux_loss_enabled", "top_entropy_quantile", "reward_weights", "num_generations_eval"),
    *("multi_objective_aggregation", "scale_rewards", "loss_type", "use_transformers_continuous_batching"),
    "generation_config",
]


def test_trls_trainer_has_the_attributes_that_we_read_and_a_table_of_one_rollout(ours):
    trainer = ours(**KINDS["trl"])
    assert [name for name in ATTRIBUTES if not hasattr(trainer, name)] == []
    # The rows of another rollout replace those of this one.
    columns = (trainer._logs[name] for name in ("prompt", "completion", "advantages"))
    assert {column.maxlen for column in columns} == {trainer.args.generation_batch_size}


def test_the_default_of_advantage_eps_is_trls(ours):
    def small(completions, **columns):
        return [reward / 10_000 for reward in letters(completions)]

    trainer = ours(small, **KINDS["trl"])
    trainer._prepare_inputs([{"prompt": "3 + 4?"}] * 4 + [{"prompt": "Hello"}] * 4)
    rewards = torch.tensor(trainer._logs["rewards"]["small"]).view(2, 4)
    expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + TRL_EQUAL["advantage_eps"])
    assert list(trainer._logs["advantages"]) == pytest.approx(expected.flatten().tolist(), rel=1e-4)


# The fields of TRL's config, by what reads them. Our loss:
OF_OUR_LOSS = {
    *("beta", "epsilon", "epsilon_high", "delta", "importance_sampling_level", "loss_type", "use_bias_correction_kl"),
    *("off_policy_mask_threshold", "top_entropy_quantile", "max_completion_length", "steps_per_generation"),
    *("sapo_temperature_pos", "sapo_temperature_neg", "use_vllm", "vllm_importance_sampling_correction"),
    *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    *("entropy_coef", "use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta"),
    *("entropy_target", "router_aux_loss_coef"),
}
# Other code of TRL: its rollout, its constructor, its log.
OF_TRL = {
    *("cache_implementation", "cast_lm_head_to_fp32", "chat_template_kwargs", "disable_dropout", "generation_kwargs"),
    *("ds3_gather_for_generation", "generation_batch_size", "log_completions", "log_completions_hub_repo", "min_p"),
    *("log_multimodal", "log_unique_prompts", "mask_truncated_completions", "max_tool_calling_iterations"),
    *("model_init_kwargs", "multi_objective_aggregation", "num_completions_to_print", "num_generations"),
    *("num_generations_eval", "num_iterations", "pad_to_multiple_of", "ref_model_mixup_alpha", "ref_model_sync_steps"),
    *("remove_unused_columns", "repetition_penalty", "reward_weights", "scale_rewards", "shuffle_dataset"),
    *("sync_ref_model", "temperature", "top_k", "top_p", "transformers_continuous_batching_config"),
    *("trust_remote_code", "use_transformers_continuous_batching", "vllm_enable_sleep_mode", "vllm_group_port"),
    *("vllm_gpu_memory_utilization", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
    *("vllm_importance_sampling_mode", "vllm_max_model_length", "vllm_mode", "vllm_model_impl"),
    *("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout"),
    *("vllm_structured_outputs_regex", "vllm_tensor_parallel_size"),
}
# Old names, which the config turns into others.
OF_NOTHING = {"use_transformers_paged", "vllm_importance_sampling_cap"}


def test_every_field_of_trls_config_has_a_reader():
    of_transformers = {field.name for field in fields(transformers.TrainingArguments)}
    lists = (OF_OUR_LOSS, OF_TRL, OF_NOTHING)
    assert {field.name for field in fields(GRPOConfig)} - of_transformers == set().union(*lists) - of_transformers
    assert sum(map(len, lists)) == len(set().union(*lists))
    loss = inspect.getsource(GRPOTrainer._compute_loss)
    files = (grpo_math.trainer.trainer, updates, loss_settings, losses)
    source = "".join(map(inspect.getsource, files))
    assert {name for name in OF_OUR_LOSS if name not in source} == set()
    # A field of our loss alone that our loss does not read would be ignored in silence.
    read = {name for name in OF_TRL if re.search(rf"\b(?:self|args)\.{name}\b", loss)}
    assert read == set()


def test_trl_equal_names_every_field_that_moves_a_weight():
    assert set(MathGRPOConfig.__annotations__) == set(TRL_EQUAL)
    assert TRL_EQUAL["advantage_eps"] == MathGRPOConfig.advantage_eps


def private(path, owner):
    """The private attributes that a file reads of ``owner``, as ``owner._name`` or by a name in `state.ATTRIBUTES`."""
    return set(re.findall(rf"(?<![\w.]){owner}\.(_[a-z]\w*)", path.read_text(encoding="utf-8")))


def test_every_private_attribute_that_we_read_is_trls_or_set_in_our_constructor():
    files = Path(grpo_math.trainer.trainer.__file__).parent.glob("*.py")
    read = {path.name: private(path, "trainer") | private(path, "self.trainer") for path in files}
    extra = private(Path(grpo_math.trainer.trainer.__file__), "self")
    source = inspect.getsource(grpo_trainer) + inspect.getsource(transformers.trainer)
    trls = {
        *re.findall(r"self\.(_[a-z]\w*)(?:: [^=\n]+)? = ", source),
        *re.findall(r"def (_[a-z]\w*)\(\s*self", source),
    }
    if "num_steps_trained" not in source:  # transformers 5.17 divides the sum of losses by all steps
        trls.add("_initial_global_step")
    # Every other file reads what is TRL's alone: ours have public names there, or are handed in.
    assert {name: names - trls for name, names in read.items() if names - trls} == {}
    assert set(state.ATTRIBUTES) <= {*trls, *re.findall(r"self\.(\w+) = ", source)}
    ours = inspect.getsource(MathGRPOTrainer)
    made = {*re.findall(r"self\.(_[a-z]\w*)(?:: [^=\n]+)? = ", ours), *re.findall(r"def (_[a-z]\w*)\(\s*self", ours)}
    assert extra - trls - made == set()


@pytest.mark.parametrize("module", [grpo_math, grpo_math.trainer])
def test_a_script_with_another_minor_version_of_trl_ends_before_trl_is_imported(module, monkeypatch):
    monkeypatch.delitem(vars(module), "MathGRPOTrainer", raising=False)
    monkeypatch.setattr("grpo_math.system.machine.versions", lambda: {"trl": "1.17.0"})
    with pytest.raises(UserError, match=r"^trl 1\.17\.0 is not a version that this works with .*: pip install"):
        _ = module.MathGRPOTrainer

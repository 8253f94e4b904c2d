"""What this package relies on in TRL: a new TRL fails here, with the name of what moved."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers.trainer
import trl
from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer
from trl.trainer.utils import add_fused_lm_head

import grpo_math.trainer.trainer
from grpo_math.generation.sync import AdapterGeneration
from grpo_math.trainer import state
from grpo_math.trainer.config import TRL_EQUAL, MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer

SIGNATURES = {
    "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
    "_generate": ["self", "prompts"],
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
    "_get_train_sampler": ["self", "dataset"],
    "evaluate": ["self", "eval_dataset", "ignore_keys", "metric_key_prefix"],
    "_determine_best_metric": ["self", "metrics", "trial"],
    "_load_best_model": ["self"],
    "train": ["self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
    "_save": ["self", "output_dir", "state_dict"],
    "_save_checkpoint": ["self", "model", "trial"],
    "_maybe_log_save_evaluate": [
        *("self", "tr_loss", "grad_norm", "model", "trial", "epoch", "ignore_keys_for_eval", "start_time"),
        "learning_rate",
    ],
    "_save_optimizer_and_scheduler": ["self", "output_dir"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
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
    assert parameters(getattr(GRPOTrainer, name)) == SIGNATURES[name]


def test_the_scoring_method_begins_as_ours_does():
    assert parameters(GRPOTrainer._get_per_token_logps_and_entropies)[: len(SCORING)] == SCORING
    assert parameters(MathGRPOTrainer._get_per_token_logps_and_entropies)[: len(SCORING)] == SCORING


def test_nothing_else_of_trl_is_overridden():
    ours = {name for name, value in vars(MathGRPOTrainer).items() if inspect.isfunction(value)}
    overridden = {name for name in ours if hasattr(GRPOTrainer, name)}
    assert overridden == {*SIGNATURES, "__init__", "_get_per_token_logps_and_entropies"}


def test_vllm_generation_is_what_the_adapter_sync_stands_in_for():
    ours = {name for name in vars(AdapterGeneration) if hasattr(VLLMGeneration, name) and not name.startswith("__")}
    assert ours == {"_init_vllm", "sync_weights", "generate"}
    assert parameters(VLLMGeneration._init_vllm) == parameters(VLLMGeneration.sync_weights) == ["self"]
    assert parameters(VLLMGeneration.generate) == parameters(AdapterGeneration.generate)
    made = inspect.getsource(GRPOTrainer.__init__).partition("self.vllm_generation = VLLMGeneration(")[2]
    keywords = set(re.findall(r"^ {16}(\w+)=", made.partition("\n            )")[0], re.MULTILINE))
    assert {"model", "accelerator", "mode", "server_base_url", "max_completion_length"} <= keywords
    assert keywords <= set(parameters(VLLMGeneration.__init__))


def test_the_attributes_that_the_adapter_sync_reads_are_set_in_trls_constructor():
    source = inspect.getsource(VLLMGeneration)
    for name in ("_dist", "server_timeout", "enable_sleep_mode", "_llm_weights_sleeping", "llm", "generation_kwargs"):
        assert f"self.{name} = " in source, name
    assert "self.llm = LLM(" in source
    assert "self.llm.sleep(level=2)" in source
    assert "vllm_client.get_server_info()" in inspect.getsource(GRPOTrainer.__init__)


def test_the_constructor_takes_what_trls_takes():
    assert parameters(GRPOTrainer.__init__)[:4] == ["self", "model", "reward_funcs", "args"]
    assert parameters(MathGRPOTrainer.__init__)[:4] == ["self", "model", "reward_funcs", "args"]


def test_the_fused_head_scores_shifted_labels_and_passes_other_arguments_on():
    source = inspect.getsource(add_fused_lm_head)
    assert "labels = shift_labels" in source
    assert "getattr(self, backbone_attr)(*args, **kwargs)" in source


def test_a_missing_old_log_prob_is_the_policys_own_detached():
    """The reinforce surrogate rests on this."""
    source = inspect.getsource(GRPOTrainer._compute_loss)
    assert "per_token_logps.detach() if old_per_token_logps is None else old_per_token_logps" in source


def test_trl_scores_the_adapter_that_our_reference_is():
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert 'adapter_name="ref" if "ref" in model.peft_config else None' in source


def test_trls_epsilon_of_the_deviation_is_the_trl_equal_one():
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert "advantages / (std_rewards + 1e-4)" in source
    assert TRL_EQUAL["advantage_eps"] == 1e-4


def test_trl_equal_names_every_field_that_moves_a_weight():
    own = set(MathGRPOConfig.__annotations__)
    assert own == set(TRL_EQUAL)


def test_the_attributes_that_we_read_are_set_in_trls_constructor():
    source = inspect.getsource(grpo_trainer)
    for name in (
        "beta",
        "ref_model",
        "aux_loss_enabled",
        "top_entropy_quantile",
        "reward_weights",
        "num_generations_eval",
        "multi_objective_aggregation",
        "scale_rewards",
        "loss_type",
        "use_transformers_continuous_batching",
        "generation_config",
        "_last_loaded_step",
        "_metrics",
        "vllm_generation",
    ):
        assert f"self.{name} = " in source, name


def private(path, owner):
    """The private attributes that a file reads of ``owner``, as ``owner._name`` or by a name in `state.ATTRIBUTES`."""
    return set(re.findall(rf"(?<![\w.]){owner}\.(_[a-z]\w*)", path.read_text(encoding="utf-8")))


def test_every_private_attribute_that_we_read_is_trls_or_set_in_our_constructor():
    files = Path(grpo_math.trainer.trainer.__file__).parent.glob("*.py")
    read = {path.name: private(path, "trainer") | private(path, "self.trainer") for path in files}
    own = private(Path(grpo_math.trainer.trainer.__file__), "self")
    source = inspect.getsource(grpo_trainer) + inspect.getsource(transformers.trainer)
    trls = {*re.findall(r"self\.(_[a-z]\w*)(?:: [^=\n]+)? = ", source), *re.findall(r"def (_[a-z]\w*)\(self", source)}
    # Every other file reads what is TRL's alone: ours have public names there, or are handed in.
    assert {name: names - trls for name, names in read.items() if names - trls} == {}
    assert set(state.ATTRIBUTES) <= trls
    ours = inspect.getsource(MathGRPOTrainer)
    assert {name for name in own - trls if f"self.{name}" not in ours and f"def {name}" not in ours} == set()


def bare_trainer(rollout):
    """Return a trainer that has only the attributes that TRL's `_generate` reads: `__init__` did not run."""
    trainer = object.__new__(MathGRPOTrainer)
    trainer.accelerator = SimpleNamespace(device=torch.device("cpu"), gather=lambda values: values)
    trainer.model = SimpleNamespace(training=True)
    trainer.state = SimpleNamespace(global_step=0, num_input_tokens_seen=0)
    trainer.processing_class = SimpleNamespace(batch_decode=lambda rows, **_: ["text" for _ in rows])
    trainer._tokenizer, trainer.eos_token_ids = SimpleNamespace(pad_token_id=0), [2]
    trainer.tools, trainer.use_vllm, trainer.rollout_func = None, False, rollout
    trainer._metrics = {"train": defaultdict(list)}
    return trainer


# TRL's own tests make a trainer in this way to see who generates.


def test_a_rollout_func_generates_for_a_trainer_without_its_constructor():
    asked = []

    def rollout(prompts, trainer):
        asked.append((prompts, trainer))
        return {"prompt_ids": [[5, 6]], "completion_ids": [[7, 2]], "logprobs": [[-0.5, 0.0]], "env_mask": [[0, 1]]}

    trainer = bare_trainer(rollout)
    prompt_ids, completion_ids, mask, *_ = trainer._generate(["What is 1 + 1?"])
    assert (prompt_ids, completion_ids, mask) == ([[5, 6]], [[7, 2]], [[0, 1]])
    assert asked == [(["What is 1 + 1?"], trainer)]


def test_trls_errors_of_a_rollout_func_are_raised_for_such_a_trainer():
    with pytest.raises(ValueError, match="must return keys"):
        bare_trainer(lambda *_: {"prompt_ids": [[5]], "completion_ids": [[2]]})._generate(["What?"])
    with pytest.raises(RuntimeError, match="No completions were generated"):
        bare_trainer(lambda *_: {"prompt_ids": [], "completion_ids": [], "logprobs": []})._generate(["What?"])

"""Rules for combinations of settings, in one table that `MathGRPOConfig`, `grpo-math doctor` and training read.

>>> settings = {name: field.default for name, field in fields().items()} | {"output_dir": "run"}
>>> [(level, line)] = violations({**settings, "surrogate": "reinforce", "epsilon": 0.1})
>>> level, str(line)
('warning', 'epsilon=0.1 has no effect: the surrogate reinforce does not read it: leave it out')

fields.py checks the type, range and choices of each setting. checks/ has the checks that need data.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from grpo_math.errors import ConfigError
from grpo_math.generation.vllm_server import ABOVE, NO_ADDRESS, RANKS
from grpo_math.problems.from_recipe import evaluates
from grpo_math.reading import is_table
from grpo_math.rewards.functions import SHIPPED
from grpo_math.run.weights import launched_with
from grpo_math.settings.fields import fields
from grpo_math.settings.surrogates import READ_BY, TRL_LOSSES, surrogate_and_reduction
from grpo_math.settings.vllm import teacher_url
from grpo_math.system.addresses import is_address, is_this_machine
from grpo_math.user_functions import is_user_function

logger = logging.getLogger(__name__)
Settings = Mapping[str, Any]

NEGATIVE = [name for name, one in SHIPPED.items() if one.can_be_negative]
LEAVE = "leave it out"
NO_PREFETCH = "cannot prefetch: {} change what is requested from vLLM"
LOW_LORA = 5e-6  # learning rate; below it, an adapter hardly changes in a few hundred steps


class Rule(NamedTuple):
    """A rule for several settings. ``fields`` names the settings at fault, separated by spaces. ``reason`` and
    ``remedy`` may contain settings: {beta}.

    An ``error`` is raised before weights load; a ``warning`` is logged as one line.
    """

    fields: str
    broken: Callable[[Settings], Any]
    reason: str
    remedy: str = LEAVE
    level: str = "error"


def changed(s: Settings, names: str) -> list[str]:
    """Return the settings in ``names``, separated by spaces, that do not have their defaults."""
    return [name for name in names.split() if s[name] != fields()[name].default]


def unused(names: str, where: Callable[[Settings], Any], reason: str, remedy: str = LEAVE) -> Rule:
    """Return the rule for settings that nothing reads: a warning if one is changed, because TRL ignores it too."""
    return Rule(names, lambda s: where(s) and changed(s, names), f"has no effect: {reason}", remedy, "warning")


def given(**values: Any) -> Callable[[Settings], bool]:
    """Return the condition that settings have these values. True stands for any value except None, 0 and an empty one,
    and False for these.

    >>> given(use_vllm=True, vllm_mode="server")({"use_vllm": True, "vllm_mode": "colocate"})
    False
    """
    return lambda s: all(
        (bool(s[name]) if isinstance(value, bool) else s[name]) == value for name, value in values.items()
    )


def without(switch: str, *prefixes: str, besides: str = "") -> Rule:
    """Return the rule for settings that nothing reads without the setting ``switch``, except ``besides``."""
    names = " ".join(name for name in fields() if name.startswith(prefixes) and name != besides)
    return unused(names, given(**{switch: False}), f"{switch} is not set", f"set {switch}, or leave it out")


def steps_in_backward(optim: str) -> bool:
    """Return True for an optimizer of transformers that steps in each backward pass, layer by layer."""
    return "lomo" in optim or optim.endswith("layerwise")


# Settings of the trainer, for recipes and scripts.

_OF_SURROGATES = tuple(dict.fromkeys(" ".join(READ_BY.values()).split()))


def surrogate_of(s: Settings) -> str:
    """Return the surrogate that ``surrogate``, or TRL's ``loss_type``, names; "module:function" for any of a user."""
    name, _ = surrogate_and_reduction(s["surrogate"], s["loss_type"])
    return "module:function" if is_user_function(name) else name


def _not_read(surrogate: str, read: str) -> Rule:
    """Return the rule for the settings of other surrogates."""
    others = " ".join(name for name in _OF_SURROGATES if name not in read.split())
    return unused(others, lambda s: surrogate_of(s) == surrogate, f"the surrogate {surrogate} does not read it")


# TRL checks some of these in the constructor of its trainer, after the weights are loaded, and only warns of others.
UPDATE = [
    unused(
        "baseline scale_rewards advantage_eps",
        given(multi_objective_aggregation="normalize_then_sum"),
        "multi_objective_aggregation='normalize_then_sum' has another baseline and scale",
    ),
    Rule(
        "resample_groups",
        given(resample_groups=True, multi_objective_aggregation="normalize_then_sum"),
        "does not work with multi_objective_aggregation='normalize_then_sum', which normalizes what was drawn",
    ),
    unused(
        "scale_rewards advantage_eps",
        lambda s: is_user_function(s["baseline"]),
        "baseline={baseline!r} gives the advantages themselves",
    ),
    Rule(
        "scale_rewards",
        lambda s: s["scale_rewards"] == "mean" and s["baseline"] in ("leave_one_out", "none"),
        "(MaxRL) divides by the mean of the group, which baseline={baseline!r} does not subtract",
        "use baseline group_mean",
    ),
    unused("advantage_eps", given(scale_rewards="mean"), "scale_rewards='mean' adds nothing to the mean"),
    Rule(
        "scale_rewards multi_objective_aggregation",
        lambda s: s["baseline"] == "pass_at_k" and changed(s, "scale_rewards multi_objective_aggregation"),
        "does not work with baseline='pass_at_k', which reads only verdicts and has its own scale",
    ),
    unused("advantage_eps", given(baseline="pass_at_k"), "baseline='pass_at_k' has its own scale"),
    Rule(
        "k",
        lambda s: s["baseline"] == "pass_at_k" and s["k"] > (s["num_generations"] or 0),
        "is more than num_generations={num_generations}, the completions that baseline='pass_at_k' chooses from",
        "give 2 to num_generations",
    ),
    unused("k", lambda s: s["baseline"] != "pass_at_k", "baseline={baseline!r} is not pass_at_k"),
    unused(
        "max_tokens_per_micro_batch",
        lambda s: changed(s, "entropy_coef use_adaptive_entropy top_entropy_quantile"),
        "entropy_coef={entropy_coef}, use_adaptive_entropy={use_adaptive_entropy} and "
        "top_entropy_quantile={top_entropy_quantile} look at whole micro-batches of per_device_train_batch_size",
    ),
    *(_not_read(surrogate, read) for surrogate, read in {**READ_BY, "module:function": ""}.items()),
    unused(
        "epsilon",
        lambda s: surrogate_of(s) == "cispo" and s["epsilon_high"] is not None,
        "the surrogate cispo has one bound, and epsilon_high={epsilon_high} is set",
    ),
    # With vLLM, the log-probs of the sampler count.
    unused(
        "off_policy_mask_threshold",
        given(surrogate="reinforce", use_vllm=False),
        "surrogate='reinforce' holds the ratio at 1",
    ),
    Rule(
        "importance_sampling_level",
        lambda s: s["importance_sampling_level"] == "sequence" and surrogate_of(s) not in ("clip", "cispo", "sapo"),
        "makes the ratio that of a sequence, and surrogate={surrogate!r} with loss_type={loss_type!r} does not use it",
        "leave it out, or use the surrogate clip, cispo or sapo",
    ),
    without("use_adaptive_entropy", "entropy_coef_", "entropy_target"),
    Rule(
        "activation_offloading",
        given(activation_offloading=True, gradient_checkpointing=False),
        "without gradient_checkpointing would copy all that every layer saves",
        "set gradient_checkpointing to true",
    ),
    Rule("fp16", given(fp16=True, use_cpu=True), "is computed on GPUs alone, and accelerate ignores it on a CPU"),
    Rule(
        "use_transformers_continuous_batching",
        given(fp16=True, use_transformers_continuous_batching=True),
        "turns the trained weights into float16, whose gradients cannot be scaled (fp16)",
    ),
    Rule(
        "loss_type",
        lambda s: s["surrogate"] not in ("clip", TRL_LOSSES.get(s["loss_type"], (s["surrogate"],))[0]),
        "is TRL's name of a surrogate, and surrogate={surrogate!r} is another",
        "use dapo, grpo or another loss_type that only reduces",
    ),
    Rule(
        "loss_type",
        lambda s: (surrogate_of(s), s["loss_type"], s["importance_sampling_level"]) == ("clip", "luspo", "token"),
        "was made for the ratio of a sequence, and importance_sampling_level is token",
        "set importance_sampling_level: sequence, or use dr_grpo, which also does not divide by a length",
        "warning",
    ),
    Rule(
        "epsilon_high",
        lambda s: surrogate_of(s) == "cispo" and s["epsilon_high"] is None,
        "is missing, so that the surrogate cispo clamps the ratio at {epsilon}",
        "set epsilon_high: 5.0",
        "warning",
    ),
    Rule(
        "delta",
        lambda s: s["delta"] is not None and s["delta"] <= 1 + (s["epsilon_high"] or s["epsilon"]),
        "caps the ratio below what epsilon={epsilon:g} and epsilon_high={epsilon_high} let through",
        "give a number above 1 + epsilon_high (or epsilon), or leave it out",
        "warning",
    ),
    Rule(
        "vllm_importance_sampling_mode",
        lambda s: (
            surrogate_of(s) == "vespo"
            and s["use_vllm"]
            and s["vllm_importance_sampling_correction"]
            and not s["vllm_importance_sampling_mode"].startswith("token_")
        ),
        "does not work with the surrogate vespo, which needs the ratio of each token between vLLM and the model",
        "use token_truncate or token_mask",
    ),
    Rule(
        "vllm_importance_sampling_mode",
        lambda s: (
            surrogate_of(s) in ("dppo", "dppo_kl")
            and s["use_vllm"]
            and s["vllm_importance_sampling_mode"] == "geometric_mask"
        ),
        "does not work with the surrogate {surrogate}, whose ratio is that to vLLM",
        "use the surrogate clip, or leave it out",
    ),
    Rule(
        "torch_compile torch_compile_backend torch_compile_mode",
        lambda s: s["pack_updates"] and changed(s, "torch_compile torch_compile_backend torch_compile_mode"),
        "would compile again for every packed row: rows are scored unpacked",
        "leave it out, or set pack_updates to false",
        "warning",
    ),
    Rule(
        "optim",
        lambda s: s["pack_updates"] and steps_in_backward(s["optim"]),
        "steps in each backward pass, once for each micro-batch of a packed update: rows are scored unpacked",
        "use another optimizer, or set pack_updates to false",
        "warning",
    ),
]

REFERENCE = [
    # k2 without the ratio is what REINFORCE++ takes for a beta of yours.
    unused(
        "kl_estimator use_bias_correction_kl",
        lambda s: s["beta"] == 0 and (s["kl_estimator"], s["use_bias_correction_kl"]) != ("k2", False),
        "beta=0 leaves the KL term out",
    ),
    unused("use_bias_correction_kl", given(kl_estimator="advantage"), "kl_estimator=advantage has no KL term"),
    without("sync_ref_model", "ref_model_"),
    Rule(
        "sync_ref_model",
        given(sync_ref_model=True, beta=False),
        "has no reference to move (beta=0)",
        "set beta above 0, or leave this out",
    ),
    Rule(
        "reference_refresh_steps",
        given(reference_refresh_steps=True, beta=False),
        "has no reference to refresh (beta=0)",
        "set beta above 0, or leave this at 0",
    ),
    Rule(
        "reference_refresh_steps",
        given(reference_refresh_steps=True, sync_ref_model=True),
        "and sync_ref_model=True would both move the reference",
        "leave one of the two out",
    ),
    Rule(
        "reference_refresh_steps",
        lambda s: s["reference_refresh_steps"] and (s["fsdp"] or launched_with("FSDP")),
        "does not work with fsdp",
        "use DeepSpeed, or leave it at 0",
    ),
    Rule(
        "reference_model",
        given(reference_model=True, beta=False),
        "has no KL term to be the reference of (beta=0)",
        "set beta above 0 (1 for on-policy distillation), or leave it out",
    ),
    Rule(
        "reference_model",
        lambda s: s["reference_model"] and (s["reference_refresh_steps"] or s["sync_ref_model"]),
        "would be replaced by the policy (reference_refresh_steps={reference_refresh_steps}, "
        "sync_ref_model={sync_ref_model})",
        "leave one of them out",
    ),
    Rule(
        "reference_model",
        lambda s: s["reference_model"] and s["cast_lm_head_to_fp32"] and not teacher_url(s),
        "does not work with cast_lm_head_to_fp32",
        "leave cast_lm_head_to_fp32 out",
    ),
    Rule(
        "reference_model",
        lambda s: s["reference_model"] and (s["fsdp"] or launched_with("FSDP")) and not teacher_url(s),
        "does not work with FSDP",
        "use ZeRO-2 or DDP, or serve it: http://HOST:PORT",
    ),
    Rule("reference_model", lambda s: teacher_url(s) and not is_address(s["reference_model"]), *NO_ADDRESS),
    Rule(
        "temperature",
        lambda s: teacher_url(s) and s["temperature"] != 1,
        "does not work with a teacher on a server: vLLM applies no temperature to the log-probs of given tokens",
        "set temperature to 1.0, or name a model as reference_model",
    ),
    without("reference_model", "reference_dtype", "reference_in_4bit"),
    unused("reference_dtype reference_in_4bit", teacher_url, "reference_model is on a server", "give it to the server"),
]

# Settings that change the distribution that vLLM samples from, and not the trainer's.
_BIASING = "top_p top_k min_p repetition_penalty vllm_structured_outputs_regex"
_BIASING_KEYS = (
    *("presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens"),
    *("structured_outputs", "logits_processors"),
)


_on_server = given(use_vllm=True, vllm_mode="server")
VLLM = [
    without("use_vllm", "vllm_", besides="vllm_server_timeout"),
    unused(
        "vllm_server_timeout",
        lambda s: not s["use_vllm"] and not teacher_url(s),
        "neither use_vllm nor a teacher names a server",
    ),
    unused("vllm_server_base_url", given(use_vllm=True, vllm_mode="colocate"), "vllm_mode={vllm_mode!r} has no server"),
    unused(
        "vllm_server_host",
        lambda s: _on_server(s) and s["vllm_server_base_url"] and not is_this_machine(s["vllm_server_host"]),
        "vllm_server_base_url names the server",
        "leave one of the two out",
    ),
    unused(
        "vllm_server_port",
        # The launcher adds the address of a server that it has started at the stated port.
        lambda s: (
            _on_server(s)
            and s["vllm_server_base_url"]
            and not re.search(rf":{s['vllm_server_port']}(/|$)", s["vllm_server_base_url"])
        ),
        "vllm_server_base_url names the port",
        "leave one of the two out",
    ),
    unused(
        "vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_model_impl",
        _on_server,
        "vllm_mode is server",
        "give it to the server",
    ),
    unused(
        "vllm_importance_sampling_mode vllm_importance_sampling_clip_max",
        given(use_vllm=True, vllm_importance_sampling_correction=False),
        "vllm_importance_sampling_correction=False",
    ),
    unused(
        "geometric_mask_low geometric_mask_high geometric_mask_weight",
        lambda s: s["vllm_importance_sampling_mode"] != "geometric_mask",
        "vllm_importance_sampling_mode={vllm_importance_sampling_mode} is not geometric_mask",
    ),
    Rule(
        "vllm_server_base_url",
        lambda s: s["vllm_server_base_url"] and not is_address(s["vllm_server_base_url"]),
        *NO_ADDRESS,
    ),
    Rule(
        "staleness",
        lambda s: s["staleness"] and not _on_server(s),
        "needs a server that samples on its own (use_vllm={use_vllm}, vllm_mode={vllm_mode})",
        "set use_vllm: true and vllm_mode: server",
    ),
    Rule(
        "staleness",
        given(staleness=True, vllm_sync="merged"),
        "with vllm_sync={vllm_sync!r} would change the weights that a batch is being sampled by",
        "set vllm_sync to adapter",
    ),
    Rule(
        "staleness",
        given(staleness=True, vllm_importance_sampling_correction=False),
        "trains on samples of an older policy, and vllm_importance_sampling_correction=False leaves it at that",
        "set vllm_importance_sampling_correction to true",
    ),
    Rule(
        "vllm_share_weights",
        lambda s: s["vllm_share_weights"] and (not s["use_vllm"] or _on_server(s)),
        "needs an engine in the training process (use_vllm={use_vllm}, vllm_mode={vllm_mode})",
        "set use_vllm: true and vllm_mode: colocate",
    ),
    Rule(
        "vllm_share_weights",
        given(vllm_share_weights=True, vllm_sync="merged"),
        "with vllm_sync={vllm_sync!r} would merge the adapter into the weights that vLLM uses",
        "set vllm_sync to adapter",
    ),
    Rule(
        "vllm_share_weights",
        lambda s: s["vllm_share_weights"] and s["vllm_tensor_parallel_size"] > 1,
        "does not work with vllm_tensor_parallel_size={vllm_tensor_parallel_size}, which splits each weight",
        "set vllm_tensor_parallel_size to 1",
    ),
    Rule(
        "vllm_share_weights",
        given(vllm_share_weights=True, cast_lm_head_to_fp32=True),
        "does not work with cast_lm_head_to_fp32, which copies the LM head",
        "leave cast_lm_head_to_fp32 out",
    ),
    Rule(
        _BIASING,
        lambda s: s["use_vllm"] and s["vllm_importance_sampling_correction"] and changed(s, _BIASING),
        "changes the distribution: vLLM's log-probs are of the changed one, the trainer's are not, so the ratio "
        "that corrects the loss is biased",
        LEAVE,
        "warning",
    ),
    Rule(
        "generation_kwargs",
        lambda s: (
            s["use_vllm"]
            and s["vllm_importance_sampling_correction"]
            and any(_mapping(s, "generation_kwargs").get(name) for name in _BIASING_KEYS)
        ),
        "changes the distribution that vLLM's log-probs are of, and not the trainer's, so the ratio that corrects the "
        "loss is biased",
        LEAVE,
        "warning",
    ),
]

# Settings that only this program reads, or that it treats differently from TRL.


def _mapping(s: Settings, name: str) -> dict[str, Any]:
    """Return a setting that is a mapping; {} if the setting is empty, or a path."""
    return s[name] if isinstance(s[name], dict) else {}


def _sets(mapping: str, name: str, field: str) -> Rule:
    """Return the rule that a mapping must not set ``name``, which has the field ``field``."""
    return Rule(mapping, lambda s: name in _mapping(s, mapping), f"sets {name}, which has a field", f"set {field}")


# A key of a mapping -> the recipe's field for it.
MODEL_KEYWORDS = {
    **{name: name for name in ("dtype", "attn_implementation", "trust_remote_code")},
    "torch_dtype": "dtype",
    "revision": "model_revision",
    "quantization_config": "load_in_4bit",
}
GENERATION_KEYWORDS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "cache_implementation")},
    **dict.fromkeys(("max_new_tokens", "max_length", "max_tokens"), "max_completion_length"),
    **dict.fromkeys(("num_return_sequences", "n"), "num_generations"),
}
_EVALUATE = "set heldout_every"


def _no_pattern(s: Settings) -> bool:
    """Return whether peft could not read the modules: TRL makes a list of one name a string, which is a pattern."""
    modules = s["lora_target_modules"] or []
    try:
        return len(modules) == 1 and not re.compile(modules[0])
    except re.error:
        return True


_served_adapter = given(use_peft=True, use_vllm=True, vllm_sync="adapter")
PROGRAM = [
    *(_sets("model_init_kwargs", name, field) for name, field in MODEL_KEYWORDS.items()),
    *(_sets("generation_kwargs", name, field) for name, field in GENERATION_KEYWORDS.items()),
    Rule(
        "generation_kwargs",
        lambda s: (
            not _mapping(s, "generation_kwargs").get("do_sample", True)
            or _mapping(s, "generation_kwargs").get("num_beams", 1) != 1
        ),
        "would not sample: the completions of a group would be alike",
    ),
    Rule("trust_remote_code", lambda s: s["trust_remote_code"], "would run code of a model repository", "leave it off"),
    Rule(
        "load_best_model_at_end keep_best stop_at",
        lambda s: (s["load_best_model_at_end"] or s["keep_best"] or s["stop_at"]) and not evaluates(s),
        "needs evaluations during training",
        _EVALUATE,
    ),
    Rule(
        "save_strategy",
        lambda s: s["save_strategy"] == "best" and not evaluates(s),
        "needs evaluations during training",
        _EVALUATE,
    ),
    Rule(
        "keep_best",
        given(keep_best=True, save_strategy="no"),
        "has no checkpoints (save_strategy='no')",
        "set save_strategy: best, or steps",
    ),
    Rule(
        "heldout_every",
        lambda s: s["heldout_every"] and s["eval_strategy"] != "no",
        "and eval_strategy={eval_strategy} both set when to evaluate",
        "leave one of the two out",
    ),
    Rule(
        "eval_steps",
        given(eval_strategy="steps", eval_steps=None),
        "is missing: transformers would evaluate at every logged step",
        "give the steps between two evaluations",
    ),
    unused(
        "eval_steps",
        lambda s: s["heldout_every"] or s["eval_strategy"] != "steps",
        "heldout_every={heldout_every} and eval_strategy={eval_strategy} set when to evaluate",
    ),
    unused(
        "heldout metric_for_best_model", lambda s: not evaluates(s), "nothing is evaluated during training", _EVALUATE
    ),
    Rule(
        "remove_unused_columns", given(remove_unused_columns=True), "would take the gold answers away from the rewards"
    ),
    Rule(
        "logging_strategy",
        given(logging_strategy="no"),
        "would leave the run without its history",
        "leave it out, or set logging_steps",
    ),
    Rule(
        "ignore_data_skip", given(ignore_data_skip=True), "would resume with different problems than the run stopped at"
    ),
    Rule(
        "accelerator_config",
        lambda s: any(_mapping(s, "accelerator_config").get(name) for name in ("split_batches", "dispatch_batches")),
        "would tear groups of completions apart",
    ),
    Rule("staleness", given(staleness=True, tools=True), NO_PREFETCH.format("tools"), "leave it at 0"),
    Rule("output_dir", given(output_dir=False), "is missing", "name the folder that the run writes to"),
    # Data
    unused(
        "dataset_split",
        lambda s: is_table(s["dataset"]) and "[" not in s["dataset_split"],
        "a file has one split",
        "leave it out, or cut the file: train[200:]",
    ),
    unused(
        "eval_dataset",
        lambda s: s["eval_n"] == 0 and (s["heldout"] or not evaluates(s)),
        "nothing is evaluated",
        "set eval_n, or heldout_every",
    ),
    without("eval_dataset", "eval_columns"),
    without("tools", "max_tool_calling_iterations"),
    unused("python", lambda s: "python" not in s["tools"], "python is not among tools", "set tools: [python]"),
    # Rewards
    Rule(
        "rewards",
        given(rewards=False, reference_model=False),
        "is empty",
        "name a reward function, such as accuracy, or a reference_model to distil",
    ),
    Rule(
        "resample_groups",
        given(resample_groups=True, rewards=False),
        "needs rewards, and on-policy distillation (rewards=[]) has none",
        "leave it at 0",
    ),
    Rule(
        "rewards",
        lambda s: len(set(s["rewards"])) < len(s["rewards"]),
        "names a function twice",
        "name it once, with a weight in reward_weights",
    ),
    Rule(
        "rewards",
        lambda s: (
            s["baseline"] == "pass_at_k" and (s["rewards"] != ["accuracy"] or s["reward_weights"] not in (None, [1]))
        ),
        "is more than the verdict, and baseline='pass_at_k' needs the verdict only",
        "set rewards: [accuracy], without reward_weights",
    ),
    Rule(
        "rewards",
        lambda s: (
            s["scale_rewards"] == "mean"
            and (set(s["rewards"]) & set(NEGATIVE) or any(weight < 0 for weight in s["reward_weights"] or ()))
        ),
        "can be negative, and scale_rewards='mean' (MaxRL) divides by their mean",
        f"leave out {', '.join(NEGATIVE)} and negative reward_weights",
    ),
    unused(
        "multi_objective_aggregation",
        lambda s: len(s["rewards"]) == 1,
        "one reward is normalized alone",
        "name several rewards, or leave it out",
    ),
    Rule(
        "reward_weights",
        lambda s: s["reward_weights"] is not None and len(s["reward_weights"]) != len(s["rewards"]),
        "are not as many as the reward functions",
        "give one weight for each",
    ),
    # Adapter and number format
    without("use_peft", "lora_", "use_dora", "use_rslora"),
    without("load_in_4bit", "bnb_4bit_", "use_bnb_"),
    Rule(
        "vllm_share_weights",
        given(vllm_share_weights=True, load_in_8bit=True),
        "does not work with load_in_8bit, which vLLM lacks",
        "leave load_in_8bit out",
    ),
    Rule(
        "use_bnb_nested_quant",
        lambda s: (
            s["vllm_share_weights"]
            and s["load_in_4bit"]
            and not (s["use_bnb_nested_quant"] and s["bnb_4bit_quant_type"] == "nf4")
        ),
        "(bnb_4bit_quant_type={bnb_4bit_quant_type!r}) is not how vLLM quantises the weights of vllm_share_weights",
        "set use_bnb_nested_quant: true and bnb_4bit_quant_type: nf4",
    ),
    # vLLM's loader of adapters refuses DoRA and modules_to_save (its PEFTHelper).
    Rule(
        "use_dora lora_modules_to_save lora_target_parameters",
        lambda s: _served_adapter(s) and (s["use_dora"] or s["lora_modules_to_save"] or s["lora_target_parameters"]),
        "cannot be served by vLLM as an adapter",
        "set vllm_sync to merged",
    ),
    Rule("lora_r", lambda s: _served_adapter(s) and s["lora_r"] > RANKS[-1], *ABOVE),
    Rule("lora_target_modules", _no_pattern, "is not a regular expression", "use all-linear, or names of modules"),
    Rule(
        "lora_dropout",
        given(use_peft=True, beta=True, lora_dropout=True),
        "with beta={beta}: the KL takes in the noise of the dropout",
        "lora_dropout: 0.0",
        "warning",
    ),
    Rule(
        "lora_alpha",
        lambda s: s["use_peft"] and s["lora_alpha"] > 8 * s["lora_r"],
        "scales the adapter up by more than 8 (lora_alpha / lora_r, lora_r={lora_r})",
        "lora_alpha: twice lora_r",
        "warning",
    ),
    Rule(
        "learning_rate",
        lambda s: s["use_peft"] and s["learning_rate"] < LOW_LORA,
        "is so low that an adapter barely changes in a few hundred steps",
        "learning_rate: 1e-5",
        "warning",
    ),
    Rule(
        "sync_ref_model",
        given(use_peft=True, sync_ref_model=True),
        "cannot work with use_peft: TRL loads no second model with an adapter",
        "use reference_refresh_steps",
    ),
    Rule(
        "load_in_4bit load_in_8bit",
        lambda s: (s["load_in_4bit"] or s["load_in_8bit"]) and not s["use_peft"],
        "cannot be trained without an adapter",
        "set use_peft to true",
    ),
    Rule(
        "dtype",
        given(dtype="float16", use_peft=False),
        "would train float16 weights, whose gradients cannot be scaled",
        "set dtype: float32 (fp16: true still multiplies in float16), or use_peft: true",
    ),
    Rule(
        "dtype",
        lambda s: s["dtype"] == "float16" and s["use_peft"] and s["bf16"] is False and not s["fp16"],
        "without fp16 has no loss scale, so that small gradients become zero",
        "set dtype: float32, or fp16: true on a GPU",
    ),
    # Steps, saving and logging
    Rule(
        "save_only_model",
        given(save_only_model=True),
        "leaves the optimizer out of checkpoints: a run that stops cannot be resumed",
        LEAVE,
        "warning",
    ),
    unused("num_train_epochs", lambda s: s["max_steps"] > 0, "max_steps={max_steps} ends the run", "max_steps: -1"),
    unused("save_steps", given(save_strategy="no"), "save_strategy is no", "save_strategy: steps"),
    Rule(
        "logging_steps",
        lambda s: 0 < s["max_steps"] < s["logging_steps"],
        "of max_steps={max_steps}: the history stays empty",
        "logging_steps: 1",
        "warning",
    ),
    Rule(
        "warmup_steps",
        lambda s: 0 < s["max_steps"] <= s["warmup_steps"] and s["lr_scheduler_type"] != "constant",
        "of max_steps={max_steps}: the learning rate is never reached",
        "give a tenth of max_steps",
        "warning",
    ),
    without("log_completions", "num_completions_to_print", "log_unique_prompts"),
    # The Hub. A run is pushed once, at its end.
    without("push_to_hub", "hub_model_id", "hub_private_repo", "hub_revision"),
    unused(
        "hub_strategy",
        lambda s: s["push_to_hub"] and s["hub_strategy"] != "end",
        "a run is pushed once, at its end",
        "hub_strategy: end",
    ),
    without("use_liger_kernel", "liger_kernel_config"),
]
TRAINER_RULES = [*UPDATE, *REFERENCE, *VLLM]
RULES = [*TRAINER_RULES, *PROGRAM]


def violations(s: Settings, rules: Sequence[Rule] = RULES) -> Iterator[tuple[str, ConfigError]]:
    """Yield the level and the error of each broken rule. ``s`` has every field that the rules read."""
    for rule in rules:
        if rule.broken(s):
            # The settings that the user has changed are at fault. If none is, a default is.
            name, *more = changed(s, rule.fields) or rule.fields.split()
            others = f"(and {', '.join(more)}) " if more else ""
            yield rule.level, ConfigError(name, s[name], others + rule.reason.format_map(s), rule.remedy.format_map(s))


def refuse(s: Settings) -> None:
    """Raise the first error of the settings of a `MathGRPOConfig`; log the warnings if there is no error."""
    lines = list(violations(s, TRAINER_RULES))
    for level, line in lines:
        if level == "error":
            raise line
    for _, line in lines:
        logger.warning(str(line))

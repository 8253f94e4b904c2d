"""Advantages, the loss and its reference: settings and rules.

Surrogate and reduction are two settings, ``surrogate`` and ``loss_type``. Three of TRL's loss types name both.
"""

from dataclasses import dataclass

from grpo_math.settings.declare import Facts, Rule, setting, without
from grpo_math.settings.trl_types import GRPOConfig
from grpo_math.system.machine import launched_with
from grpo_math.system.user_functions import is_user_function

# TRL's loss_type -> the surrogate that it names, and the loss_type with which TRL reduces it.
TRL_LOSSES = {"cispo": ("cispo", "dapo"), "sapo": ("sapo", "grpo"), "vespo": ("vespo", "dapo")}
# A surrogate -> the settings that it reads, of those that only surrogates read.
READ_BY = {
    "clip": "epsilon epsilon_high delta",
    "reinforce": "",
    "gmpo": "epsilon epsilon_high",
    "cispo": "epsilon epsilon_high",
    "dppo": "dppo_high dppo_low",
    "dppo_kl": "dppo_high dppo_low",
    "sapo": "sapo_temperature_pos sapo_temperature_neg",
    "vespo": "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg",
    "module:function": "",
}
# Baselines that are advantages of verdicts, which have no further scale.
VERDICT_BASELINES = ("pass_at_k", "w_reinforce", "nsr")


def surrogate_and_reduction(surrogate: str, loss_type: str) -> tuple[str, str]:
    """Return the surrogate, and the loss_type that only reduces.

    >>> surrogate_and_reduction("clip", "sapo"), surrogate_and_reduction("sapo", "prompt_mean")
    (('sapo', 'grpo'), ('sapo', 'prompt_mean'))
    """
    named, reduction = TRL_LOSSES.get(loss_type, (surrogate, loss_type))
    return named if surrogate == "clip" else surrogate, reduction


FACTS: Facts = {
    "baseline": {
        "choices": (
            *("group_mean", "leave_one_out", "quantile", "length_weighted", "none"),
            *VERDICT_BASELINES,
            "module:function",
        )
    },
    "train_completions": {"ge": 0, "shapes_rollout": True},
    "k": {"ge": 2},
    "advantage_eps": {"gt": 0},
    "surrogate": {
        "choices": ("clip", "reinforce", "gmpo", "cispo", "dppo", "dppo_kl", "sapo", "vespo", "module:function"),
        "shapes_rollout": True,
    },
    "dppo_high": {"gt": 0, "le": 1},
    "dppo_low": {"gt": 0, "le": 1},
    "kl_estimator": {"choices": ("k3", "k1", "k2", "advantage")},
    "reference_refresh_steps": {"ge": 0},
}


@dataclass
class Loss(GRPOConfig):
    """Advantage and loss."""

    baseline: str = setting(
        "group_mean",
        "The baseline subtracted from a reward: group_mean, leave_one_out, quantile, length_weighted, or none; or "
        "advantages of verdicts: pass_at_k, w_reinforce, nsr; or module:function. The function turns rewards (P, G) "
        "into advantages (P, G).",
    )
    train_completions: int = setting(
        0, "Train on this many completions of each prompt: those whose rewards vary most (PODS); 0: on all."
    )
    k: int = setting(4, "The k of baseline pass_at_k: less than num_generations.")
    advantage_eps: float = setting(
        1e-4, "Added to the standard deviation that divides an advantage. Shipped recipes have 1e-6."
    )
    surrogate: str = setting(
        "clip",
        "The loss of a token, which loss_type reduces: clip, reinforce, gmpo, cispo, sapo, vespo, dppo, dppo_kl, or "
        "module:function. clip: PPO's. reinforce: the score function. gmpo: the geometric mean of clipped ratios "
        "(epsilon bounds their logarithms). cispo, sapo, vespo: TRL's. dppo, dppo_kl: the ratio to the sampler, "
        "without tokens that moved too far.",
    )
    dppo_high: float = setting(0.2, "How far dppo lets the probability of a token with A > 0 rise (dppo_kl: in nats).")
    dppo_low: float = setting(0.2, "How far dppo lets the probability of a token with A < 0 fall (dppo_kl: in nats).")
    kl_estimator: str = setting(
        "k3",
        "The estimator of the KL to the reference (its weight is beta): k3 (TRL's), k1, k2, or advantage (k1 is taken "
        "from each token's advantage).",
    )
    reference_refresh_steps: int = setting(
        0, "Every this many optimizer steps, the reference of the KL term becomes the current policy; 0: never."
    )
    reference_model: str | None = setting(
        None, "Another model with the same tokenizer as the reference of the KL term: a folder or a Hub id."
    )

    @property
    def effective_surrogate(self) -> str:
        """Return the surrogate that ``surrogate``, or TRL's ``loss_type``, names; "module:function" for any of a
        user."""
        name, _ = surrogate_and_reduction(self.surrogate, self.loss_type)
        return "module:function" if is_user_function(name) else name

    @property
    def names_two_surrogates(self) -> bool:
        """Return True if ``surrogate`` and TRL's ``loss_type`` name different surrogates."""
        named, _ = TRL_LOSSES.get(self.loss_type, (self.surrogate, ""))
        return self.surrogate not in ("clip", named)


def _not_read_by(surrogate: str) -> Rule:
    read = READ_BY[surrogate].split()
    others = dict.fromkeys(name for names in READ_BY.values() for name in names.split() if name not in read)
    why = f"the surrogate {surrogate} does not read it"
    return Rule("no_effect", " ".join(others), lambda s: s.effective_surrogate == surrogate, why)


RULES = [
    Rule(
        "no_effect",
        "baseline scale_rewards advantage_eps",
        lambda s: s.multi_objective_aggregation == "normalize_then_sum",
        "multi_objective_aggregation='normalize_then_sum' has another baseline and scale",
    ),
    Rule(
        "no_effect",
        "scale_rewards advantage_eps",
        lambda s: is_user_function(s.baseline),
        "baseline={baseline!r} gives the advantages themselves",
    ),
    Rule(
        "error",
        "scale_rewards",
        lambda s: s.scale_rewards == "mean" and s.baseline in ("leave_one_out", "quantile", "length_weighted", "none"),
        "(MaxRL) divides by the mean of the group, which baseline={baseline!r} does not subtract",
        "use baseline group_mean",
    ),
    Rule(
        "no_effect",
        "advantage_eps",
        lambda s: s.scale_rewards == "mean",
        "scale_rewards='mean' adds nothing to the mean",
    ),
    Rule(
        "error",
        "scale_rewards multi_objective_aggregation",
        lambda s: (
            (s.scale_rewards != "group" or s.multi_objective_aggregation != "sum_then_normalize")
            and s.baseline in VERDICT_BASELINES
        ),
        "does not work with baseline={baseline!r}, which reads only verdicts and has its own scale",
    ),
    Rule(
        "no_effect",
        "advantage_eps",
        lambda s: s.baseline in VERDICT_BASELINES,
        "baseline={baseline!r} has its own scale",
    ),
    Rule(
        "error",
        "k",
        lambda s: s.baseline == "pass_at_k" and s.k >= (s.train_completions or s.num_generations),
        "leaves at most one choice of k completions to baseline='pass_at_k' (num_generations={num_generations}, "
        "train_completions={train_completions}), so every gradient is zero",
        "give less than num_generations and train_completions, from 2 on",
    ),
    Rule(
        "error",
        "train_completions",
        lambda s: s.train_completions and not 2 <= s.train_completions <= s.num_generations,
        "is not between 2 and num_generations={num_generations}",
        "give a number from 2 to {num_generations}, or leave it out",
    ),
    Rule(
        "error",
        "train_completions",
        lambda s: s.train_completions and s.loss_type == "bnpo",
        "does not work with loss_type='bnpo', which divides by the tokens of each micro-batch",
        "use dapo or grpo",
    ),
    Rule("no_effect", "k", lambda s: s.baseline != "pass_at_k", "baseline={baseline!r} is not pass_at_k"),
    Rule(
        "no_effect",
        "epsilon",
        lambda s: s.effective_surrogate == "cispo" and s.epsilon_high is not None,
        "the surrogate cispo has one bound, and epsilon_high={epsilon_high} is set",
    ),
    # With vLLM, the log-probs of the sampler count.
    Rule(
        "no_effect",
        "off_policy_mask_threshold",
        lambda s: s.surrogate == "reinforce" and not s.use_vllm,
        "surrogate='reinforce' holds the ratio at 1",
    ),
    Rule(
        "error",
        "importance_sampling_level",
        lambda s: s.importance_sampling_level == "sequence" and s.effective_surrogate not in ("clip", "cispo", "sapo"),
        "makes the ratio that of a sequence, and surrogate={surrogate!r} with loss_type={loss_type!r} does not use it",
        "leave it out, or use the surrogate clip, cispo or sapo",
    ),
    without("use_adaptive_entropy", "entropy_coef_.* entropy_target"),
    Rule(
        "error",
        "loss_type",
        lambda s: s.names_two_surrogates,
        "is TRL's name of a surrogate, and surrogate={surrogate!r} is another",
        "use dapo, grpo or another loss_type that only reduces",
    ),
    Rule(
        "warning",
        "loss_type",
        lambda s: s.loss_type == "luspo" and s.effective_surrogate == "clip" and s.importance_sampling_level == "token",
        "was made for the ratio of a sequence, and importance_sampling_level is token",
        "set importance_sampling_level: sequence, or use dr_grpo, which also does not divide by a length",
    ),
    Rule(
        "warning",
        "epsilon_high",
        lambda s: s.effective_surrogate == "cispo" and s.epsilon_high is None,
        "is missing, so that the surrogate cispo clamps the ratio at {epsilon}",
        "set epsilon_high: 5.0",
    ),
    Rule(
        "warning",
        "delta",
        lambda s: s.delta is not None and s.delta <= 1 + (s.epsilon_high or s.epsilon),
        "caps the ratio below what epsilon={epsilon:g} and epsilon_high={epsilon_high} let through",
        "give a number above 1 + epsilon_high (or epsilon), or leave it out",
    ),
    # k2 without the ratio is what REINFORCE++ takes for a beta of yours.
    Rule(
        "no_effect",
        "kl_estimator use_bias_correction_kl",
        lambda s: not s.beta and (s.kl_estimator != "k2" or s.use_bias_correction_kl),
        "beta=0 leaves the KL term out",
    ),
    Rule(
        "no_effect",
        "use_bias_correction_kl",
        lambda s: s.kl_estimator == "advantage",
        "kl_estimator=advantage has no KL term",
    ),
    without("sync_ref_model", "ref_model_.*"),
    Rule(
        "error",
        "sync_ref_model",
        lambda s: s.sync_ref_model and not s.beta,
        "has no reference to move (beta=0)",
        "set beta above 0, or leave this out",
    ),
    Rule(
        "error",
        "reference_refresh_steps",
        lambda s: s.reference_refresh_steps and not s.beta,
        "has no reference to refresh (beta=0)",
        "set beta above 0, or leave this at 0",
    ),
    Rule(
        "error",
        "reference_refresh_steps",
        lambda s: s.reference_refresh_steps and s.sync_ref_model,
        "and sync_ref_model=True would both move the reference",
        "leave one of the two out",
    ),
    Rule(
        "error",
        "reference_refresh_steps",
        lambda s: s.reference_refresh_steps and (s.fsdp or launched_with("FSDP")),
        "does not work with fsdp",
        "use DeepSpeed, or leave it at 0",
    ),
    Rule(
        "error",
        "reference_model",
        lambda s: s.reference_model and not s.beta,
        "has no KL term to be the reference of (beta=0)",
        "set beta above 0 (1 for on-policy distillation), or leave it out",
    ),
    Rule(
        "error",
        "reference_model",
        lambda s: s.reference_model and (s.reference_refresh_steps or s.sync_ref_model),
        "would be replaced by the policy (reference_refresh_steps={reference_refresh_steps}, "
        "sync_ref_model={sync_ref_model})",
        "leave one of them out",
    ),
    Rule(
        "error",
        "reference_model",
        lambda s: s.reference_model and s.cast_lm_head_to_fp32,
        "does not work with cast_lm_head_to_fp32",
        "leave cast_lm_head_to_fp32 out",
    ),
    Rule(
        "error",
        "reference_model",
        lambda s: s.reference_model and (s.fsdp or launched_with("FSDP")),
        "does not work with FSDP",
        "use ZeRO-2 or DDP",
    ),
    Rule(
        "error",
        "reference_model",
        lambda s: "://" in str(s.reference_model),
        "is a server, and a teacher is loaded into this process",
        "name a folder or a model on the Hub",
    ),
    *map(_not_read_by, READ_BY),
]

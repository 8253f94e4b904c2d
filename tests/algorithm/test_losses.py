"""The KL estimators against the exact KL of a tiny vocabulary, and loss, gradient and figures against TRL's.

Where a claim is about a mean, the mean is an enumeration of everything that can be sampled, in float64.
"""

import math
from collections import defaultdict
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from random import Random
from types import SimpleNamespace

import pytest
import torch
from small_trainers import letters, logps_of, relative, weights
from torch.nn.functional import kl_div
from transformers import LlamaForCausalLM
from trl import GRPOTrainer

from grpo_math.algorithm.loss_inputs import Normalizers, loss_inputs
from grpo_math.algorithm.loss_metrics import LossMetrics, StepResult
from grpo_math.algorithm.losses import (
    KL_ESTIMATORS,
    SURROGATES,
    Loss,
    LossInputs,
    LossSettings,
    Metric,
    Statistic,
    compute_loss,
    importance_ratio,
    token_ratio,
    try_surrogate,
)
from grpo_math.algorithm.rows import loss_mask, select
from grpo_math.errors import ConfigError
from grpo_math.run import metrics
from grpo_math.trainer.loss_settings import loss_settings
from grpo_math.trainer.meter import StepMeter
from grpo_math.trainer.updates import Updates

V = 5


def logits(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mean_gradient(theta, sampler, estimator, corrected, reference):
    """The gradient of the loss term, averaged over every token that ``sampler`` (log-probs) can draw."""
    policy = theta.log_softmax(-1)
    value = KL_ESTIMATORS[estimator](policy, reference)
    if corrected:
        value = value * importance_ratio(policy[:, None], sampler[:, None], torch.ones(V, 1), "token")[:, 0]
    return torch.autograd.grad((sampler.exp() * value).sum(), theta)[0]


def targets(theta, reference):
    """What a gradient can be the gradient of."""
    policy = theta.log_softmax(-1)
    losses = {
        # The distribution of the mean comes second.
        "reverse": kl_div(reference, policy, reduction="sum", log_target=True),
        "forward": kl_div(policy, reference, reduction="sum", log_target=True),
        "squares": (policy.exp() * (policy - reference).square()).sum() / 2,
    }
    gradients = {name: torch.autograd.grad(loss, theta, retain_graph=True)[0] for name, loss in losses.items()}
    return {**gradients, "zero": torch.zeros_like(theta)}


TABLE = [
    ("k1", False, "zero"),
    ("k2", False, "reverse"),
    ("k3", False, "forward"),
    ("k1", True, "reverse"),
    ("k2", True, "squares"),
    ("k3", True, "reverse"),
]


@pytest.mark.parametrize(("estimator", "corrected", "target"), TABLE)
def test_the_mean_gradient_is_that_of_the_table_and_off_policy_the_ratio_alone_keeps_it(estimator, corrected, target):
    theta, reference, old = logits(0, V).requires_grad_(), logits(1, V).log_softmax(-1), logits(2, V).log_softmax(-1)
    got = mean_gradient(theta, theta.detach().log_softmax(-1), estimator, corrected, reference)
    for name, expected in targets(theta, reference).items():
        assert torch.allclose(got, expected, atol=1e-12) == (name == target), name
    off_policy = mean_gradient(theta, old, estimator, corrected, reference)
    assert torch.allclose(off_policy, targets(theta, reference)[target], atol=1e-12) == corrected


def test_the_reference_as_an_advantage_has_the_gradient_of_the_reverse_kl_and_none_at_the_reference():
    theta, reference, old = logits(0, V).requires_grad_(), logits(1, V).log_softmax(-1), logits(2, V).log_softmax(-1)
    settings = {"loss_type": "prompt_mean", "kl_estimator": "advantage", "epsilon_low": 1.0, "epsilon_high": 1e3}

    def gradient(reference):
        policy, zeros = theta.log_softmax(-1)[:, None], torch.zeros(V, 1)
        # The mean over all tokens that the older policy can draw.
        options = {"ref_logps": reference[:, None], "row_weights": old.exp()[:, None]}
        loss = compute_loss(
            LossInputs(policy, old[:, None], zeros, zeros + 1, zeros, **options), LossSettings(beta=1.0, **settings)
        )
        assert torch.equal(loss.metrics["kl"].values, policy.detach() - reference[:, None])
        return torch.autograd.grad(loss.loss, theta)[0]

    assert torch.allclose(gradient(reference), targets(theta, reference)["reverse"], atol=1e-12)
    assert not gradient(theta.detach().log_softmax(-1)).any()


@pytest.mark.parametrize(
    "options", [{"surrogate": name, "importance_sampling_level": "sequence"} for name in ("clip", "cispo", "sapo")]
    + [{"surrogate": "gmpo"}],
)  # fmt: skip
def test_with_the_ratio_of_a_sequence_each_token_keeps_its_own_advantage_of_the_reference(options):
    """Equation 14 of GSPO: the gradient of a token is its advantage times the sequence's ratio, over the length."""
    old, now, reference = (logits(seed, 2, 3).log_softmax(-1) for seed in range(3))
    now.requires_grad_()
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]], dtype=torch.float64)
    settings = LossSettings(beta=0.5, kl_estimator="advantage", loss_type="grpo", epsilon_low=9.0, epsilon_high=99.0)
    settings = replace(settings, **options)
    each = torch.tensor([[1.0], [-0.5]], dtype=torch.float64)
    loss = compute_loss(LossInputs(now, old, each, mask, mask, ref_logps=reference), settings)
    gradient = torch.autograd.grad(loss.loss, now)[0]
    policy, lengths = now.detach(), mask.sum(1, keepdim=True)
    ratio = (((policy - old) * mask).sum(1, keepdim=True) / lengths).exp()
    advantages = each - 0.5 * (policy - reference)
    if options["surrogate"] == "sapo":
        rate = torch.where(advantages > 0, 1.0, 1.05)
        gate = torch.sigmoid(rate * (ratio - 1))
        ratio = 4 * gate * (1 - gate) * ratio
    torch.testing.assert_close(gradient, -advantages * ratio * mask / lengths / 2)


# Each setting of TRL's loss, and the rows that it depends on: the first value is the default.
SETTINGS = {
    "loss_type": ["dapo", "grpo", "bnpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo"],
    "importance_sampling_level": ["token", "sequence"],
    "delta": [None, 1.3],
    "epsilon_high": [0.2, 0.4],
    "beta": [0.0, 0.3],
    "use_bias_correction_kl": [True, False],
    "off_policy_mask_threshold": [None, 0.05],
    "top_entropy_quantile": [1.0, 0.4],
    "entropy": ["none", "static", "adaptive, below the target", "adaptive, above it"],
    "sampler": [None, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
    "old": [True, False],
    "advantages": ["of completions", "of tokens"],
    "mode": ["train", "eval"],
}
DEFAULTS = {name: values[0] for name, values in SETTINGS.items()}
PAIRS = [
    {**DEFAULTS, **dict(zip(pair, values, strict=True))}
    for pair in combinations(SETTINGS, 2)
    for values in product(*(SETTINGS[name] for name in pair))
]
DRAWS = [{name: Random(f"{i} {name}").choice(values) for name, values in SETTINGS.items()} for i in range(300)]


CASES = [*PAIRS, *DRAWS]


def stand_in(chosen):
    """The attributes of a trainer that TRL's loss and ours read."""
    kind = chosen["entropy"].partition(",")[0]
    accelerator = SimpleNamespace(
        num_processes=1,
        device="cpu",
        sync_gradients=True,
        gather=lambda value: value,
        gather_for_metrics=lambda value: value,
        reduce=lambda value, reduction: value,
        pad_across_processes=lambda value, **options: value,
    )
    args = SimpleNamespace(
        **{name: chosen[name] for name in ("delta", "use_bias_correction_kl")},
        **{name: 1.0 + i / 4 for i, name in enumerate(("sapo_temperature_pos", "sapo_temperature_neg"))},
        **{name: 1.5 + i / 4 for i, name in enumerate(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg"))},
        vespo_lambda_neg=3.0,
        steps_per_generation=6,
        gradient_accumulation_steps=3,
        entropy_target=3.0 if "below" in chosen["entropy"] else 0.1,
        entropy_coef_delta=0.25,
        entropy_coef_max=0.9,
        entropy_coef_min=0.1,
    )
    same = ("loss_type", "importance_sampling_level", "epsilon_high", "beta", "off_policy_mask_threshold")
    log = {"train": defaultdict(list), "eval": defaultdict(list)}
    trainer = SimpleNamespace(
        **{name: chosen[name] for name in (*same, "top_entropy_quantile", "mode")},
        args=args,
        accelerator=accelerator,
        model=SimpleNamespace(training=chosen["mode"] == "train"),
        epsilon_low=0.2,
        use_vllm=chosen["sampler"] is not None,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=chosen["sampler"],
        vllm_importance_sampling_clip_min=0.5,
        vllm_importance_sampling_clip_max=2.0,
        num_iterations=1,
        max_completion_length=9,
        current_gradient_accumulation_steps=3,
        aux_loss_enabled=True,
        router_aux_loss_coef=0.3,
        is_deepspeed_enabled=False,
        use_adaptive_entropy=kind == "adaptive",
        entropy_coef=0.5,
        _entropy_bonus_enabled=kind != "none",
        _last_world_entropy=args.entropy_target,
        _entropy_window_stats=None,
        _metrics=log,
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
    )
    trainer.get_high_entropy_mask = partial(GRPOTrainer.get_high_entropy_mask, trainer)
    return trainer


def random_rows(chosen, rows=5, width=6, old=None):
    """Rows: one has no token, one no advantage, one a token of a tool, and one a token without a sampler's log-prob."""
    seed = repr(sorted(chosen.items(), key=str))
    generator = torch.Generator().manual_seed(Random(seed).getrandbits(32))
    log_probs = [-3 * torch.rand(rows, width, generator=generator, dtype=torch.float64) for _ in range(4)]
    lengths = torch.tensor([6, 4, 0, 1, 5])
    mask = (torch.arange(width) < lengths[:, None]).long()
    tool_mask = torch.ones_like(mask)
    tool_mask[0, 2] = 0
    logps, drawn, ref, sampling = log_probs
    old = drawn if old is None else old
    sampling = sampling.clone()
    sampling[1, 1] = torch.nan
    shape = (rows,) if chosen["advantages"] == "of completions" else (rows, width)
    inputs = {
        "prompt_ids": torch.ones(rows, 2, dtype=torch.long),
        "prompt_mask": torch.ones(rows, 2, dtype=torch.long),
        "completion_ids": mask,
        "completion_mask": mask,
        "tool_mask": tool_mask,
        "advantages": torch.randn(shape, generator=generator, dtype=torch.float64),
        "num_items_in_batch": torch.tensor(40.0),
        "ref_per_token_logps": ref,
        **({"old_per_token_logps": old} if chosen["old"] or chosen["sampler"] else {}),
    }
    if chosen["sampler"]:
        # As TRL computes it at a rollout.
        difference = torch.nan_to_num((old - sampling) * mask * tool_mask, nan=0.0)
        if chosen["sampler"].startswith("sequence"):
            difference = difference.sum(dim=1, keepdim=True)
        ratio = difference.exp()
        truncated, masked = ratio.clamp(0.5, 2.0), ratio.masked_fill((ratio < 0.5) | (ratio > 2.0), 0.0)
        inputs["importance_sampling_ratio"] = truncated if "truncate" in chosen["sampler"] else masked
        inputs["sampling_per_token_logps"] = sampling
    inputs["advantages"][4] = 0.0
    entropies = 4 * torch.rand(rows, width, generator=generator, dtype=torch.float64)
    return inputs, logps.requires_grad_(), entropies.requires_grad_()


def loss_of_trl(trainer, inputs, logps, entropies):
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logps, entropies, entropies.mean())
    return GRPOTrainer._compute_loss(trainer, None, inputs)


OURS = SimpleNamespace(
    surrogate="clip",
    kl_estimator="k3",
    dppo_high=0.2,
    dppo_low=0.2,
    geometric_mask_low=0.99,
    geometric_mask_high=1.01,
    train_completions=0,
)


def updates_of(trainer):
    """The updates of a trainer that is not a model's."""
    updates = object.__new__(Updates)
    updates.trainer, updates.settings, updates.ranks = trainer, OURS, trainer.accelerator
    log = trainer._metrics["train" if trainer.model.training else "eval"]
    updates.meter = StepMeter(lambda: log, rollouts_per_step=1.0)
    # As with images: TRL's rows are not planned.
    updates.scorer = SimpleNamespace(has_images=True)
    updates.reset()
    return updates


def loss_of_ours(trainer, inputs, logps, entropies):
    updates = updates_of(trainer)
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logps, entropies, entropies.mean())
    step = updates.new_step()
    loss = updates.loss_of(None, inputs, step)
    for _ in range(step.normalizers.accumulation):
        step.metrics.add(loss, loss_mask(inputs), len(logps))
    updates._reduce_result(step)
    return loss.loss


@pytest.mark.parametrize("loss_type", SETTINGS["loss_type"])
def test_loss_gradients_and_figures_are_trls_for_all_pairs_of_settings_and_many_combinations(loss_type):
    cases = [chosen for i, chosen in enumerate(CASES) if chosen["loss_type"] == loss_type and chosen not in CASES[:i]]
    assert len(cases) > 30
    for chosen in cases:
        results = []
        for compute in (loss_of_trl, loss_of_ours):
            trainer, (inputs, logps, entropies) = stand_in(chosen), random_rows(chosen)
            loss = compute(trainer, inputs, logps, entropies)
            gradients = torch.autograd.grad(loss, (logps, entropies), allow_unused=True, materialize_grads=True)
            figures = dict(trainer._metrics[chosen["mode"]])
            results.append((loss.detach(), gradients, figures, trainer.entropy_coef, trainer._last_world_entropy))
        (loss, gradients, figures, *entropy), (our_loss, our_gradients, our_figures, *our_entropy) = results
        torch.testing.assert_close(our_loss, loss, atol=1e-6, rtol=1e-6, msg=str(chosen))
        torch.testing.assert_close(our_gradients, gradients, atol=1e-6, rtol=1e-6)
        assert set(our_figures) - set(figures) == {metrics.RATIO, metrics.APPROX_KL}
        for name, value in figures.items():
            assert our_figures[name] == pytest.approx(value, abs=1e-6, rel=1e-6, nan_ok=True), (name, chosen)
        assert our_entropy == pytest.approx(entropy, abs=1e-6)


@pytest.mark.parametrize("sampler", [value for value in SETTINGS["sampler"] if value])
@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
def test_a_rollout_that_is_used_once_takes_its_old_log_probs_and_the_samplers_weights_from_the_update(
    sampler, loss_type
):
    chosen = {**DEFAULTS, "sampler": sampler, "loss_type": loss_type}
    trainer, (inputs, logps, entropies) = stand_in(chosen), random_rows(chosen)
    exact, *_ = random_rows(chosen, old=logps.detach())
    expected = loss_of_trl(trainer, exact, logps, entropies)
    trainer.args.gradient_accumulation_steps = trainer.args.steps_per_generation
    terms = loss_inputs(inputs, logps, entropies, Normalizers(), loss_settings(trainer, OURS))
    assert torch.equal(terms.old_logps, logps)
    torch.testing.assert_close(loss_of_ours(trainer, inputs, logps, entropies), expected)


def test_ratio_and_kl_to_the_sampling_policy_are_means_over_the_tokens():
    # Ratios 2 and 1: their mean is 1.5, and that of rho - 1 - log rho is (1 - log 2) / 2.
    mask = torch.tensor([[1, 0], [1, 0]])
    logps = torch.tensor([[0.5, 9.0], [0.25, 9.0]]).log()
    for old, expected in ((torch.tensor([[0.25, 1.0]] * 2).log(), [1.5, (1 - math.log(2)) / 2]), (logps, [1.0, 0.0])):
        step = LossMetrics()
        step.add(compute_loss(LossInputs(logps, old, mask[:, :1], mask, logps), LossSettings()), mask, 2)
        means = step.reduce(stand_in(DEFAULTS).accelerator, 1).metrics
        assert [means[name] for name in (metrics.RATIO, metrics.APPROX_KL)] == pytest.approx(expected)


def test_figures_of_parts_are_those_of_the_whole_and_skipped_rows_count_in_clip_means_alone():
    chosen = {**DEFAULTS, "beta": 0.3, "loss_type": "dapo"}
    trainer, (inputs, logps, entropies) = stand_in(chosen), random_rows(chosen)
    settings, normalizers = loss_settings(trainer, OURS), updates_of(trainer).new_step().normalizers
    whole, parts = LossMetrics(), LossMetrics(skipped_tokens=16)
    for step, indexes in ((whole, [[0, 1, 2, 3, 4]]), (parts, [[0, 3], [1, 2, 4]])):
        for index in indexes:
            rows = select(inputs, index)
            of_rows = loss_inputs(rows, logps[index], entropies[index], normalizers, settings)
            step.add(compute_loss(of_rows, settings), loss_mask(rows), len(index))
    expected = whole.reduce(trainer.accelerator, 1).metrics
    tokens = loss_mask(inputs).sum().item()
    assert tokens == 15
    for name in (metrics.CLIP_LOW, metrics.CLIP_HIGH, metrics.CLIP_REGION):
        expected[name] *= tokens / (tokens + 16)
    assert parts.reduce(trainer.accelerator, 1).metrics == pytest.approx(expected, rel=1e-5)


def test_dppo_measures_from_the_sampler_once_and_a_dropped_token_has_a_finite_gradient():
    logps = torch.tensor([[0.5, 0.5, 0.9, 1.0]], dtype=torch.float64).log().requires_grad_()
    old, sampling = torch.tensor([[0.4, 0.4, 0.1, 0.4]]).log(), torch.tensor([[0.25, torch.nan, 0.8, 0.0]]).log()
    ones, correction = torch.ones(1, 4), torch.full((1, 4), 7.0)
    values = [logps, old, torch.tensor([[1.0]]), ones, ones, None, sampling, correction]
    loss = compute_loss(LossInputs(*values), LossSettings(surrogate="dppo", loss_type="bnpo", dppo_high=0.3)).loss
    # 0.5 / 0.25; 0.5 / 0.4, whose sampler is not known; 0.9 / 0.8; a rise by 1.0 is dropped.
    assert loss.item() == pytest.approx(-(2.0 + 1.25 + 1.125) / 4)
    gradient = torch.autograd.grad(loss, logps)[0]
    torch.testing.assert_close(gradient, -torch.tensor([[2.0, 1.25, 1.125, 0.0]], dtype=torch.float64) / 4)


def test_nothing_of_a_completion_without_advantage_is_clipped_as_a_step_that_skips_it_assumes():
    logps, ones = torch.tensor([[0.9, 0.01]]).log(), torch.ones(1, 2)
    inputs = LossInputs(logps, logps.flip(1), torch.zeros(1, 1), ones, ones)
    for surrogate in SURROGATES:
        logged = compute_loss(inputs, LossSettings(surrogate=surrogate)).metrics
        assert not any(metric.values.any() for metric in logged.values() if metric.counts_skipped), surrogate


AGGREGATED = {
    "grpo": lambda losses: torch.stack([loss.mean() for loss in losses]).mean(),
    "dr_grpo": lambda losses: torch.cat(losses).sum() / (8 * 12),
    **dict.fromkeys(("bnpo", "dapo"), lambda losses: torch.cat(losses).mean()),
    "prompt_mean": lambda losses: (torch.cat(losses[:4]).mean() + torch.cat(losses[4:]).mean()) / 2,
}


@pytest.mark.parametrize(
    ("baseline", "scale", "surrogate", "loss_type", "estimator", "updates"),
    [
        ("none", "none", "reinforce", "grpo", None, 1),
        ("leave_one_out", "batch", "reinforce", "bnpo", "k2", 2),
        ("group_mean", "none", "clip", "dr_grpo", "k3", 2),
        ("leave_one_out", "group", "clip", "dapo", "k1", 2),
        ("group_mean", "mean", "dppo", "prompt_mean", "k3", 2),
        ("group_mean", "group", "clip", "dapo", "advantage", 2),
    ],
)
def test_four_steps_end_with_the_weights_of_the_formulas_in_plain_torch(
    baseline, scale, surrogate, loss_type, estimator, updates, small, chars, ours
):
    rollouts, generator = [], torch.Generator().manual_seed(0)

    def rollout(prompts, trainer):
        lengths = torch.randint(1, 9, (len(prompts),), generator=generator).tolist()
        completions = [torch.randint(3, 99, (length,), generator=generator).tolist() for length in lengths]
        rollouts.append((chars(prompts)["input_ids"], completions))
        return {"prompt_ids": rollouts[-1][0], "completion_ids": completions, "logprobs": None}

    trainer = ours(
        rollout_func=rollout,
        baseline=baseline,
        scale_rewards=scale,
        surrogate=surrogate,
        loss_type=loss_type,
        beta=0.3 if estimator else 0.0,
        kl_estimator=estimator or "k3",
        max_steps=4,
        num_iterations=updates,
        lr_scheduler_type="constant",
    )
    trainer.train()
    model = LlamaForCausalLM.from_pretrained(small)
    reference, optimizer = deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.05)
    for prompts, completions in rollouts:
        pairs = list(zip(prompts, completions, strict=True))
        rewards = torch.tensor(letters(chars.batch_decode(completions, skip_special_tokens=True))).view(2, 4)
        others = (rewards.sum(dim=1, keepdim=True) - rewards) / 3
        means = {"none": 0.0, "group_mean": rewards.mean(dim=1, keepdim=True), "leave_one_out": others}
        scales = {
            "none": 1.0,
            "mean": rewards.mean(dim=1, keepdim=True),
            "group": rewards.std(dim=1, keepdim=True),
            "batch": rewards.std(),
        }
        advantages = (rewards - means[baseline]) / scales[scale]
        old, base = ([logps_of(of, *pair).detach() for pair in pairs] for of in (model, reference))
        for _ in range(updates):
            losses = []
            for pair, advantage, before, ref in zip(pairs, advantages.flatten(), old, base, strict=True):
                now = logps_of(model, *pair)
                ratio = (now - (now.detach() if surrogate == "reinforce" else before)).exp()
                d = now - ref
                kl = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}.get(estimator, 0.0 * d)
                advantage = advantage - 0.3 * d.detach() if estimator == "advantage" else advantage
                clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                moved = (now.exp() - before.exp()).detach() * advantage.sign()
                clipped = clipped if surrogate != "dppo" else ratio * advantage * (moved <= 0.2)
                losses.append(0.3 * ratio * kl - clipped)
            AGGREGATED[loss_type](losses).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(rollouts) == 4 / updates
    assert relative(weights(trainer.model), weights(model)) < 1e-6


def constant(logps, old_logps, advantages, mask):
    return advantages * 1.0


def over_the_batch(logps, old_logps, advantages, mask):
    return -advantages * logps / (logps * mask).sum()


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (constant, "returned a loss without a gradient"),
        (over_the_batch, "gives a completion a different loss in a batch than alone"),
    ],
)
def test_a_users_surrogate_with_another_gradient_than_its_rows_is_refused(function, line):
    with pytest.raises(ConfigError, match=line):
        try_surrogate(f"{__name__}:{function.__name__}")


def test_a_users_surrogate_is_finite_where_a_ratio_overflows(ours):
    trainer = ours(surrogate="small_trainers:clip", num_iterations=2, loss_type="grpo")
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    rows = dict(trainer._prepare_inputs([{"prompt": p} for p in "ab" for _ in range(4)]))
    rows["old_per_token_logps"] = rows["old_per_token_logps"].clone()
    # TRL's clipped loss is finite: the advantage is above 0.
    rows["old_per_token_logps"][(rows["advantages"] > 0).nonzero()[0], 0] -= 200.0
    updates = trainer.grpo_math.updates
    assert updates.loss_of(trainer.model, rows, updates.step).loss.isfinite()


def test_metrics_are_alike_on_a_rank_that_has_masked_rows_alone_which_count_nothing():
    def step(clipped, mask, rows):
        means = LossMetrics()
        values = torch.ones(mask.shape)
        logged = {
            metrics.CLIP_HIGH: Metric(torch.tensor(clipped)[:, None], Statistic.COMPLETION_MEAN, counts_skipped=True),
            metrics.CLIP_HIGHEST: Metric(torch.tensor(clipped)[:, None].float(), Statistic.MAXIMUM),
            metrics.ENTROPY: Metric(values * 0.5),
        }
        means.add(Loss(values.sum(), values.sum(), torch.zeros(2), logged), mask, rows, weight=0.5)
        return means

    ranks = [step([False], torch.zeros(1, 1), 0), step([True, False], torch.ones(2, 4), 2)]
    sent = []
    for gather in (lambda values: sent.append(values) or values, lambda values: torch.cat(sent[:2])):
        accelerator = SimpleNamespace(device="cpu", num_processes=2, gather=gather)
        results = [rank.reduce(accelerator, training_steps=3) for rank in ranks]
    logged = {metrics.CLIP_HIGH: 0.5, metrics.CLIP_HIGHEST: 1.0, metrics.ENTROPY: 0.5}
    # Half of the losses 1 and 8, by two ranks and three training steps.
    assert results == [StepResult(logged, policy_loss=0.75)] * 2
    # A step that computes nothing has no entropy, and of its completions none is clipped.
    nothing = step([False], torch.zeros(1, 1), 0)
    nothing.skipped = 4
    values = nothing.reduce(SimpleNamespace(device="cpu", num_processes=1, gather=lambda values: values), 1).metrics
    assert values == {metrics.CLIP_HIGH: 0.0}


def test_gspo_token_has_gspos_loss_and_gradient_if_a_completions_tokens_share_the_advantage():
    """Equations 13 and 14 of arXiv 2507.18071, written out: each token has its own gradient, and the ratio's value."""
    old, mask = logits(1, 3, 4).mul(0.1), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    advantages, gradients = torch.tensor([[1.0], [2.0], [0.5]], dtype=torch.float64), []
    for of_tokens in (False, True):
        logps = (old + logits(2, 3, 4).mul(0.2)).requires_grad_()
        ratio = importance_ratio(logps, old, mask, "sequence")
        ratio = token_ratio(ratio, logps) if of_tokens else ratio
        inputs = LossInputs(logps, old, advantages, mask, old)
        values = SURROGATES["clip"](inputs, ratio, LossSettings(epsilon_low=0.02, epsilon_high=0.02)).values
        loss = ((values * mask).sum(dim=1) / mask.sum(dim=1)).mean()
        gradients.append((loss, *torch.autograd.grad(loss, logps)))
    torch.testing.assert_close(*gradients)
    assert 0 < gradients[0][1].count_nonzero() < 7  # some completions are clipped

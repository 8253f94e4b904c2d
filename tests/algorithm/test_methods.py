"""Each row of methods.yaml against its paper: the formulas in plain torch, completion by completion, without padding.

Rows are padded, split into micro-batches, and shared by two processes, whose gradients DDP averages.
"""

import math
from dataclasses import fields
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from trl import GRPOTrainer

from grpo_math.algorithm.advantages import advantages, most_varied, weighted
from grpo_math.algorithm.correction import sampler_ratio
from grpo_math.algorithm.losses import LossInputs, LossSettings, compute_loss, micro_batch_weight, prompt_weights
from grpo_math.rewards import REWARDS as REWARD_FUNCTIONS
from grpo_math.rewards.inputs import MAX_LENGTH
from grpo_math.settings.fields import defaults
from grpo_math.settings.recipe import METHODS, read

P, G, T, LIMIT = 2, 6, 7, 9
LENGTHS = torch.tensor([7, 3, 1, 5, 2, 6, 4, 7, 1, 1, 2, 3])
REWARDS = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 0.0, 1.0, 0.0, 1.0]], dtype=torch.float64)
# Distinct, so that one choice of completions is the best.
REWARDS_OF = {
    "pods": torch.tensor([[0.4, 0.0, 0.9, 0.3, 1.0, 0.2], [0.7, 0.8, 0.1, 1.0, 0.9, 0.6]], dtype=torch.float64),
    "on_policy_distillation": torch.zeros_like(REWARDS),
}
RENAMED = {"epsilon": "epsilon_low"}  # of a recipe's fields, in `LossSettings`


def mean(r):
    return r.mean(dim=1, keepdim=True)


def z_score(r):
    return (r - mean(r)) / r.std(dim=1, keepdim=True)


def over_batch(r):
    """Lite PPO: the deviation of all rewards."""
    return (r - mean(r)) / r.std()


def whitened(r):
    """REINFORCE++ with baseline: the deviation of what the group's mean leaves of all rewards."""
    return (r - mean(r)) / (r - mean(r)).std()


def pass_at_4(r):
    """Of the 15 subsets of 4 in the first group one is all wrong; in the second none is, which tells nothing apart."""
    subsets = list(combinations(range(G), 4))
    values = torch.tensor([float(r[0][list(one)].max()) for one in subsets], dtype=torch.float64)
    scores = (values - values.mean()) / values.std(correction=0)
    of_each = [torch.stack([score for one, score in zip(subsets, scores, strict=True) if i in one]) for i in range(G)]
    return torch.stack([torch.stack([score.mean() for score in of_each]), torch.zeros(G, dtype=torch.float64)])


def by_length(r):
    """OPO: the baseline is the mean reward of a token."""
    lengths = LENGTHS.view(P, G)
    means = [sum(n * x for n, x in zip(ns, xs, strict=True)) / sum(ns) for ns, xs in zip(lengths, r, strict=True)]
    return r - torch.stack(means)[:, None]


def over_quantile(r):
    """QAE: 0 for a prompt of which at most 0.6 are right, else 1."""
    quantile = (mean(r) > 1 - 0.4).double()
    return (r - quantile) / r.std(dim=1, keepdim=True)


def of_largest_variance(r):
    """PODS: GRPO's of the 4 completions whose rewards have the largest variance; NaN: left out."""
    subsets = [list(one) for one in combinations(range(G), 4)]
    best = [max(subsets, key=lambda one, row=row: row[one].var(correction=0).item()) for row in r]
    values = torch.full_like(r, math.nan)
    for row, one in enumerate(best):
        values[row, one] = z_score(r[[row]][:, one])[0]
    return values


ADVANTAGES = {
    "pods": of_largest_variance,
    "w_reinforce": lambda r: 0.1 * r - (1 - r),
    "nsr": lambda r: r - 1,
    "opo": by_length,
    "qae": over_quantile,
    "raft_pp": lambda r: (r == 1).double(),
    **dict.fromkeys(("dr_grpo", "dppo", "dppo_kl"), lambda r: r - mean(r)),
    "rloo": lambda r: r - (r.sum(dim=1, keepdim=True) - r) / (G - 1),
    "no_baseline": lambda r: r,
    "maxrl": lambda r: (r - mean(r)) / mean(r),
    "pass_at_k": pass_at_4,
    "lite_ppo": over_batch,
    **dict.fromkeys(("reinforce_pp_baseline", "dler", "scalerl"), whitened),
    "on_policy_distillation": torch.zeros_like,
}


def clipped(ratio, a, low=0.2, high=0.2):
    return -torch.min(ratio * a, ratio.clamp(1 - low, 1 + high) * a)


def by_sequence(c, a, low=0.2, high=0.2):
    """GSPO: the geometric mean of the ratios, for each token."""
    return clipped((c["now"] - c["old"]).mean().exp(), a, low, high).expand_as(c["now"])


def cispo(c, a):
    return -(c["now"] - c["old"]).exp().detach().clamp(max=5.0) * a * c["now"]


def sapo(c, a):
    tau = 1.0 if a > 0 else 1.05
    return -torch.sigmoid(tau * ((c["now"] - c["old"]).exp() - 1)) * 4 / tau * a


def vespo(c, a):
    w = (c["now"] - c["old"]).sum().exp().detach()
    k, rate = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
    return -(w**k) * (rate * (1 - w)).exp() * a * c["now"]


def dppo(c, a):
    """The ratio to the sampler, and the distance of the binary total variation; 0.15 as in the authors' script."""
    moved = (c["now"].exp() - c["sampler"].exp()).detach() * a.sign()
    return -(c["now"] - c["sampler"]).exp() * a * (moved <= 0.15)


def dppo_kl(c, a):
    """0.05 as in the authors' script."""
    p, q = c["sampler"].exp(), c["now"].detach().exp()
    distance = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    leaves = ((q - p) * a > 0) & (distance > 0.05)
    return -(c["now"] - c["sampler"]).exp() * a * ~leaves


def gmpo(c, a):
    """Eq. 4: the geometric mean of min(rho A, clip(rho, e^-0.4, e^0.4) A), with the sign of A."""
    ratio = (c["now"] - c["old"]).exp()
    pessimistic = torch.min(ratio * a, ratio.clamp(math.exp(-0.4), math.exp(0.4)) * a)
    return -(pessimistic.abs().log().mean().exp() * a.sign()).expand_as(ratio)


def icepop(c, a):
    """M(k) = k for k = pi_old / sampler in [0.5, 5], else 0."""
    k = (c["old"] - c["sampler"]).exp()
    return clipped((c["now"] - c["old"]).exp(), a) * k * ((k >= 0.5) & (k <= 5.0))


def reinforce_pp(c, a):
    """PPO's clip, and 0.3 times k2, whose gradient is that of the KL."""
    return clipped((c["now"] - c["old"]).exp(), a) + 0.3 * (c["now"] - c["ref"]).square() / 2


def two_sided(c, a):
    return clipped((c["now"] - c["old"]).exp().clamp(max=4.0), a)


def off_policy_mask(c, a):
    far = a < 0 and (c["old"] - c["now"]).mean() > 0.5
    return clipped((c["now"] - c["old"]).exp(), a) * (not far)


def distillation(c, a):
    """tinker and prime-rl: the advantage of a token is its log-ratio, without a gradient, and nothing is clipped."""
    return -(c["now"] - c["old"]).exp() * (c["ref"] - c["now"]).detach()


def distillation_and_reward(c, a):
    return clipped((c["now"] - c["old"]).exp(), a + (c["ref"] - c["now"]).detach())


def higher(c, a):
    return clipped((c["now"] - c["old"]).exp(), a, high=0.28)


# The loss of the tokens of one completion. The others have PPO's clip at 0.2.
LOSSES = {
    **dict.fromkeys(("dapo", "justrl", "dler", "qae"), higher),
    **dict.fromkeys(("rloo", "no_baseline", "reinforce_with_baseline", "opo"), lambda c, a: -a * c["now"]),
    "gspo": lambda c, a: by_sequence(c, a, 3e-4, 4e-4),
    **dict.fromkeys(("cispo", "scalerl"), cispo),
    "sapo": sapo,
    "vespo": vespo,
    "luspo": lambda c, a: by_sequence(c, a, 2e-3, 2.5e-3),
    "dppo": dppo,
    "dppo_kl": dppo_kl,
    "gmpo": gmpo,
    "icepop": icepop,
    "reinforce_pp_baseline": reinforce_pp,
    "high_entropy": lambda c, a: higher(c, a) * c["is_high"],
    "two_sided_clip": two_sided,
    "off_policy_mask": off_policy_mask,
    "on_policy_distillation": distillation,
    "distill_and_reward": distillation_and_reward,
}


def token_mean(losses):
    return torch.cat(losses).mean()


def completion_mean(losses):
    return torch.stack([loss.mean() for loss in losses]).mean()


def over_length(losses):
    return torch.cat(losses).sum() / (len(losses) * LIMIT)


def sequence_sum(losses):
    """RLOO and LUSPO: a completion's log-prob is the sum of its tokens'."""
    return torch.stack([loss.sum() for loss in losses]).mean()


def prompt_mean(losses):
    """MiniMax's eq. 4 and ScaleRL: the tokens of a prompt's completions, then the prompts."""
    return torch.stack([torch.cat(losses[i : i + G]).mean() for i in range(0, P * G, G)]).mean()


# From the losses of the completions, group after group. The others have a mean over all tokens.
REDUCED = {
    **dict.fromkeys(("grpo", "pods", "gspo", "sapo", "gmpo", "icepop", "off_policy_mask"), completion_mean),
    **dict.fromkeys(("no_baseline", "reinforce_with_baseline", "raft_pp"), completion_mean),
    **dict.fromkeys(("dr_grpo", "dppo", "dppo_kl"), over_length),
    **dict.fromkeys(("rloo", "luspo"), sequence_sum),
    **dict.fromkeys(("prompt_mean", "cispo", "scalerl"), prompt_mean),
}
# Methods of which the sampler's log-probs are a part, and the weight of a KL term that a row leaves to you.
SAMPLED = ("dppo", "dppo_kl", "icepop")
BETA = {"reinforce_pp_baseline": 0.3}


def random_rows(seed):
    generator = torch.Generator().manual_seed(seed)
    columns = (torch.rand(P * G, T, generator=generator, dtype=torch.float64) for _ in range(5))
    old, ref, noise, entropies, sampler = columns
    old, ref, sampler = ((0.05 + 0.9 * values).log() for values in (old, ref, sampler))
    now = (0.05 + 0.9 * (old.exp() + 0.6 * (noise - 0.5)).clamp(0, 1)).log()
    mask = (torch.arange(T) < LENGTHS[:, None]).long()
    # What stands in the padding must not count.
    return now.masked_fill(mask == 0, -50.0).requires_grad_(), old, ref, sampler, entropies, mask


def of_paper(name, seed):
    now, old, ref, sampler, entropies, _ = random_rows(seed)
    level = torch.cat([row[:n] for row, n in zip(entropies, LENGTHS, strict=True)]).quantile(0.8)
    columns = {"now": now, "old": old, "ref": ref, "sampler": sampler, "is_high": entropies >= level}
    values = ADVANTAGES.get(name, z_score)(REWARDS_OF.get(name, REWARDS)).flatten()
    loss_of = LOSSES.get(name, lambda c, a: clipped((c["now"] - c["old"]).exp(), a))
    completions = [{key: column[i, :n] for key, column in columns.items()} for i, n in enumerate(LENGTHS.tolist())]
    trained = [(c, a) for c, a in zip(completions, values, strict=True) if not a.isnan()]
    loss = REDUCED.get(name, token_mean)([loss_of(c, a) for c, a in trained])
    return values.nan_to_num(), torch.autograd.grad(loss, now)[0]


def of_method(name, ranks, cuts, seed):
    """The gradient of the fragment's loss, of rows that ``ranks`` share and that each cuts into micro-batches."""
    recipe = read(["--method", name]).settings.values()
    now, old, ref, sampler, entropies, mask = random_rows(seed)
    names = {field.name for field in fields(LossSettings)}
    chosen = {RENAMED.get(key, key): value for key, value in METHODS[name]["fields"].items()}
    chosen = {key: chosen[key] for key in chosen if key in names} | ({"beta": BETA[name]} if name in BETA else {})
    trained = recipe["train_completions"] or G
    settings = LossSettings(**chosen, max_completion_length=LIMIT, trained_share=trained / G)
    low, high_bound = settings.vllm_importance_sampling_clip_min, settings.vllm_importance_sampling_clip_max
    sampler_weights = sampler_ratio((old - sampler) * mask, settings.vllm_importance_sampling_mode, low, high_bound)
    options = (recipe["baseline"], recipe["scale_rewards"], 1e-12, recipe["k"])
    rewards = REWARDS_OF.get(name, REWARDS)
    lengths = LENGTHS.view(P, G) if recipe["baseline"] == "length_weighted" else None
    places = most_varied(rewards, trained)
    values = advantages(rewards.gather(1, places), *options, lengths)
    values = torch.zeros_like(REWARDS).scatter(1, places, values).flatten()
    mask = mask * torch.zeros_like(LENGTHS).view(P, G).scatter(1, places, 1).view(-1, 1)
    weights = prompt_weights(LENGTHS, G)[:, None]
    high = None
    if recipe["top_entropy_quantile"] < 1.0:
        accelerator = SimpleNamespace(gather=lambda x: x, pad_across_processes=lambda x, **options: x)
        trainer = SimpleNamespace(accelerator=accelerator)
        high = GRPOTrainer.get_high_entropy_mask(trainer, entropies, mask, 1 - recipe["top_entropy_quantile"])
    loss, share = torch.zeros(()), P * G // ranks
    for rank in range(ranks):
        # Every second row: both ranks have a part of each group.
        local = list(range(rank, P * G, ranks))
        tokens = mask[local].sum()
        for cut in range(cuts):
            index = local[cut::cuts]
            inputs = LossInputs(
                logps=now[index],
                old_logps=old[index],
                advantages=values[index][:, None],
                mask=mask[index],
                entropies=entropies[index],
                ref_logps=ref[index],
                sampling_logps=sampler[index] if name in SAMPLED else None,
                sampler_ratio=sampler_weights[index] if name in SAMPLED else None,
                entropy_mask=None if high is None else high[index],
                micro_batch_tokens=tokens,
                tokens_per_step=mask.sum() / ranks,
                row_weights=weights[index] * ranks,
            )
            weight = micro_batch_weight(settings.loss_type, len(index), share)
            loss = loss + compute_loss(inputs, settings).loss * weight / ranks
    return values, torch.autograd.grad(loss, now)[0]


# TRL computes the advantages of GDPO, in tests/trainer/test_rollout_in_progress.py.
@pytest.mark.parametrize("name", [name for name in METHODS if name != "gdpo"])
@pytest.mark.parametrize(("ranks", "cuts"), [(1, 1), (1, 3), (2, 2)])
def test_a_method_is_what_its_paper_says(name, ranks, cuts):
    has_formula = name in {*ADVANTAGES, *LOSSES, *REDUCED}
    assert has_formula, f"{name} has no formula: write its differences from GRPO into ADVANTAGES, LOSSES or REDUCED"
    values, gradient = of_method(name, ranks, cuts, seed=ranks * cuts + 11)
    expected, expected_gradient = of_paper(name, seed=ranks * cuts + 11)
    torch.testing.assert_close(values, expected, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-5)
    assert 0 < gradient.norm() < math.inf


def test_dapo_pays_length_half_of_what_it_pays_the_answer():
    """DAPO's answers get +1 or -1, and up to -1 for length: a right answer at the limit beats a short wrong one."""
    recipe = read(["--method", "dapo"]).settings.values()
    ids, right = [[0] * n for n in (10, 100, 10, 100)], [1.0, 1.0, 0.0, 0.0]
    paid = REWARD_FUNCTIONS[recipe["rewards"][1]]([""] * 4, [""] * 4, completion_ids=ids, **{MAX_LENGTH: 100})
    columns = torch.tensor([right, paid], dtype=torch.float64).T
    values = weighted(columns, torch.tensor(recipe["reward_weights"], dtype=torch.float64))
    of_paper = torch.tensor([[1.0, 0.0, -1.0, -2.0]], dtype=torch.float64)
    torch.testing.assert_close(advantages(values.view(1, 4), eps=1e-12), z_score(of_paper))


def test_the_defaults_that_the_formulas_assume_are_those_of_a_recipe():
    assumed = {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": None, "scale_rewards": "group", "beta": 0.0}
    assert {name: defaults()[name] for name in assumed} == assumed

"""The KL estimators against the exact KL of a tiny vocabulary, their aggregation against TRL's own, and the surrogate.

Where a claim is about a mean, the mean is an enumeration of everything that can be sampled, in float64.
"""

from copy import deepcopy
from unittest.mock import patch

import pytest
import torch
from small_trainers import letters, logps_of, relative, weights
from torch.nn.functional import kl_div
from transformers import LlamaForCausalLM
from trl import GRPOTrainer

from grpo_math.trainer.losses import importance_ratio, kl_per_token, weight_of_micro_batch
from grpo_math.trainer.trainer import MathGRPOTrainer

V = 5


def logits(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mean_gradient(theta, sampler, estimator, corrected, reference):
    """The gradient of the loss term, averaged over every token that ``sampler`` (log-probs) can draw."""
    policy = theta.log_softmax(-1)
    value = kl_per_token(policy, reference, estimator)
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


@pytest.fixture(scope="module")
def trainer(trainer_in, tmp_path_factory):
    return trainer_in(tmp_path_factory.mktemp("run"), per_device_train_batch_size=4, max_completion_length=9, beta=0.3)


def loss_and_gradient(trainer, compute, inputs, logps):
    mode = "train" if trainer.model.training else "eval"
    trainer._metrics[mode].clear()
    scores = logps, torch.ones_like(logps), None
    with patch.object(trainer, "_get_per_token_logps_and_entropies", lambda *args, **kwargs: scores):
        loss = compute(trainer, trainer.model, inputs)
    return loss.detach(), torch.autograd.grad(loss, logps)[0], trainer._metrics[mode]["kl"]


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "luspo", "dapo", "vespo"])
def test_our_kl_term_with_k3_is_trls_in_value_gradient_and_metric(
    trainer, loss_type, corrected, level, mode, monkeypatch
):
    """An estimator of another name takes our way, and everything that is not k1 or k2 is k3 there."""
    changes = [
        (trainer, "loss_type", loss_type),
        (trainer, "importance_sampling_level", level),
        (trainer, "current_gradient_accumulation_steps", 3),
        (trainer.args, "use_bias_correction_kl", corrected),
        (trainer.args, "steps_per_generation", 6),
        (trainer.settings, "kl_estimator", "k3, our way"),
    ]
    for owner, name, value in changes:
        monkeypatch.setattr(owner, name, value, raising=False)
    trainer.model.train(mode == "train")
    inputs = batch([1.0, -1.0, 0.5, 2.0], [4, 2, 3, 1])
    logps = (logits(2, 4, 4).float() - 3).requires_grad_()
    plain = loss_and_gradient(trainer, GRPOTrainer._compute_loss, inputs, logps)
    ours = loss_and_gradient(trainer, MathGRPOTrainer._loss_of, inputs, logps)
    torch.testing.assert_close(ours[0], plain[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(ours[1], plain[1], atol=1e-6, rtol=1e-5)
    assert ours[2] == pytest.approx(plain[2], rel=1e-5)


def test_ratio_and_kl_to_the_sampling_policy_are_logged(trainer, monkeypatch):
    monkeypatch.setattr(trainer, "current_gradient_accumulation_steps", 1, raising=False)
    trainer.model.train()
    inputs = batch([1.0, -1.0], [1, 1], width=2)
    del inputs["old_per_token_logps"]
    logps = torch.tensor([[0.5, 9.0], [0.25, 9.0]]).log().requires_grad_()
    # Ratios 2 and 1/2: their mean is 1.25, and that of rho - 1 - log rho is (1 - log 2 - 1/2 + log 2) / 2.
    sampled = torch.tensor([[0.25, 1.0], [0.5, 1.0]]).log()
    for old, expected in (({"old_per_token_logps": sampled}, [1.25, 0.25]), ({}, [1.0, 0.0])):
        loss_and_gradient(trainer, MathGRPOTrainer._loss_of, {**inputs, **old}, logps)
        assert [trainer._metrics["train"][name][0] for name in ("ratio", "approx_kl")] == pytest.approx(expected)


def batch(advantages: list[float], lengths: list[int], width: int = 4) -> dict:
    mask = torch.tensor([[1] * n + [0] * (width - n) for n in lengths])
    return {
        "advantages": torch.tensor(advantages),
        "completion_mask": mask,
        "completion_ids": torch.arange(len(lengths) * width).view(-1, width),
        **{name: torch.ones(len(lengths), 2, dtype=torch.long) for name in ("prompt_ids", "prompt_mask")},
        "num_items_in_batch": torch.tensor(99.0),
        "old_per_token_logps": logits(0, len(lengths), width).float() - 3,
        "ref_per_token_logps": logits(1, len(lengths), width).float() - 3,
    }


def test_the_micro_batch_with_the_only_token_has_the_whole_weight():
    assert weight_of_micro_batch("bnpo", torch.ones(1, 1), 8, torch.tensor(1)) == 1.0


AGGREGATED = {
    "grpo": lambda losses: torch.stack([loss.mean() for loss in losses]).mean(),
    "dr_grpo": lambda losses: torch.cat(losses).sum() / (8 * 12),
    **dict.fromkeys(("bnpo", "dapo"), lambda losses: torch.cat(losses).mean()),
}


@pytest.mark.parametrize(
    ("baseline", "scale", "surrogate", "loss_type", "estimator", "updates"),
    [
        ("none", "none", "reinforce", "grpo", None, 1),
        ("leave_one_out", "batch", "reinforce", "bnpo", "k2", 2),
        ("group_mean", "none", "clip", "dr_grpo", "k3", 2),
        ("leave_one_out", "group", "clip", "dapo", "k1", 2),
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
        scales = {"none": 1.0, "group": rewards.std(dim=1, keepdim=True), "batch": rewards.std()}
        advantages = (rewards - means[baseline]) / scales[scale]
        old, base = ([logps_of(of, *pair).detach() for pair in pairs] for of in (model, reference))
        for _ in range(updates):
            losses = []
            for pair, advantage, before, ref in zip(pairs, advantages.flatten(), old, base, strict=True):
                now = logps_of(model, *pair)
                ratio = (now - (now.detach() if surrogate == "reinforce" else before)).exp()
                d = now - ref
                kl = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d, None: 0.0 * d}[estimator]
                clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                losses.append(0.3 * ratio * kl - clipped)
            AGGREGATED[loss_type](losses).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(rollouts) == 4 / updates
    assert relative(weights(trainer.model), weights(model)) < 1e-6


def test_a_users_surrogate_is_finite_where_a_ratio_overflows(ours):
    trainer = ours(surrogate="small_trainers:clip", num_iterations=2, loss_type="grpo")
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    rows = dict(trainer._prepare_inputs([{"prompt": p} for p in "ab" for _ in range(4)])["micro_batches"][0]["rows"])
    rows["old_per_token_logps"] = rows["old_per_token_logps"].clone()
    # TRL's clipped loss is finite: the advantage is above 0.
    rows["old_per_token_logps"][(rows["advantages"] > 0).nonzero()[0], 0] -= 200.0
    assert trainer._loss_of(trainer.model, rows).isfinite()

"""What is fast here is what TRL computes: log-probs, gradients, completions, and whole training runs.

The reference is TRL's own method on the same trainer, or TRL's own trainer on the same seed; float32, dropout off.
"""

from itertools import product

import pytest
import torch
from peft import LoraConfig, PolyConfig, PromptTuningConfig
from small_families import try_first
from small_generation import counted, of_library
from small_trainers import SMALL, STEPS, letters, padded_batch, relative, sample_apart, scored, sparse
from trl import GRPOConfig, GRPOTrainer

from grpo_math.algorithm.losses import REDUCTIONS, SURROGATES
from grpo_math.checks.compared import differences, train
from grpo_math.trainer import tiled_mlp
from grpo_math.trainer.trainer import MathGRPOTrainer

# The tokens of the forward pass: all prompts without their last token, and all completions; or TRL's padded rows.
SHAPES = {
    "one group": ([7], 4, [5, 3, 9, 1], 6 + 18),
    "many groups of different prompts": ([7, 3, 12], 4, [5, 3, 9, 1], 6 + 2 + 11 + 3 * 18),
    "prompts of one length": ([5, 5], 3, [4, 2], 2 * 4 + 18),
    "groups of one": ([4, 9, 2], 1, [6, 2], 3 + 8 + 1 + 14),
    "a group of sixteen": ([5], 16, [1, 2, 3, 4, 5, 6, 7, 8], 4 + 2 * 36),
    "one-token completions": ([6, 2], 3, [1], 5 + 1 + 6),
    "one-token prompts": ([1, 1], 4, [4, 2, 7], 32),
    "empty completions among others": ([5, 8], 3, [4, 0, 2], 4 + 7 + 12),
    "lengths far apart": ([6], 5, [40, 1, 39, 3, 38], 5 + 121),
    "too little to save": ([30, 30], 1, [10], 2 * 40),
    "no token at all": ([5], 2, [0], 2 * 6),
}


@pytest.fixture(scope="module")
def trainer(trainer_in, tmp_path_factory):
    return trainer_in(tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_scoring_gives_trls_log_probs_entropies_and_gradients(shape, trainer):
    assert (trainer.grpo_math.scorer.packed is not None, trainer.model.config._attn_implementation) == (
        True,
        "packed_sdpa",
    )
    *rows, tokens = SHAPES[shape]
    with counted(trainer.model) as shapes:
        logps, entropies, gradient = scored(MathGRPOTrainer, trainer, *rows)
    assert [n * length for n, length in shapes] == [tokens]
    plain_logps, plain_entropies, plain_gradient = scored(GRPOTrainer, trainer, *rows)
    torch.testing.assert_close(logps, plain_logps, atol=1e-4, rtol=0)
    torch.testing.assert_close(entropies, plain_entropies, atol=1e-4, rtol=0)
    assert relative(gradient, plain_gradient) < 1e-5


def test_autocast_changes_the_packed_pass_as_little_as_the_plain_one(ours):
    exact, mixed = ours(), ours(bf16=True)
    truth, _, true_gradient = scored(GRPOTrainer, exact)
    plain, _, plain_gradient = scored(GRPOTrainer, mixed)
    packed, _, gradient = scored(MathGRPOTrainer, mixed)
    assert 0 < relative(plain, truth) < 0.1
    assert relative(packed, truth) < 1.5 * relative(plain, truth)
    assert relative(gradient, true_gradient) < 1.5 * relative(plain_gradient, true_gradient)


def test_dropout_is_not_taken_for_a_model_that_cannot_be_packed(ours):
    trainer = ours(peft_config=LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.5, init_lora_weights=False))
    trainer.model.train()
    try_first(trainer)
    assert (trainer.grpo_math.scorer.packed is not None, trainer.model.training) == (True, True)


def test_rows_without_a_gradient_are_scored_in_batches_of_the_budget_with_each_prompt_once(trainer, monkeypatch):
    ids, mask, longest = padded_batch([7, 3], 4, [5, 3, 9, 1])
    scores = []
    with counted(trainer.model) as seen, torch.no_grad():
        for budget in (0, 24, 14):
            monkeypatch.setattr(trainer.grpo_math.updates.budget, "setting", budget)
            scores.append(trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, longest, 8, True))
    # All rows at once; a group at once; the completions of 9, 5 and 3, 9, 5 and 3 and 1, and 1 tokens.
    assert [length for _, length in seen] == [6 + 2 + 2 * 18, 6 + 18, 2 + 18, 6 + 9, 6 + 8, 2 + 9, 2 + 9, 6 + 1]
    for logps, entropies, _ in scores[1:]:
        torch.testing.assert_close(logps, scores[0][0])
        torch.testing.assert_close(entropies, scores[0][1])


# The third row has a prompt of 7 tokens in columns 5 to 11, and a completion of 9.
HOLES = {"in a prompt": 8, "a prompt's last": 11, "a completion's first": 12, "in a completion": 15}


@pytest.mark.parametrize("hole", [*HOLES, "none, but weights"])
def test_rows_with_a_hole_in_their_mask_are_scored_as_trl_does(hole, trainer):
    ids, mask, longest = padded_batch([7, 3, 12], 4, [5, 3, 9, 1])
    if packs := hole not in HOLES:
        mask = mask * 0.5
    else:
        mask[2, HOLES[hole]] = 0
    for with_gradient in (True, False):
        with torch.set_grad_enabled(with_gradient), counted(trainer.model) as passes:
            arguments = (trainer, trainer.model, ids, mask, longest, 4, True)
            ours, trls = (
                kind._get_per_token_logps_and_entropies(*arguments) for kind in (MathGRPOTrainer, GRPOTrainer)
            )
        torch.testing.assert_close(ours[:2], trls[:2], atol=1e-4, rtol=0)
        # TRL's three passes, or one for all rows of an update.
        assert [n for n, _ in passes][:-3] == ([1] if packs else [12] if with_gradient else [4, 4, 4])


@pytest.fixture
def float64_by_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("float64_by_default")
@pytest.mark.parametrize("double", [False, True])
def test_scores_are_float32_also_for_a_script_in_float64(double, ours, monkeypatch):
    trainer = ours()
    trainer.model.train().to(torch.float64 if double else torch.float32)
    monkeypatch.setattr(trainer.grpo_math.updates.budget, "setting", 24)
    ids, mask, longest = padded_batch([7, 3], 4, [5, 3, 9, 1])
    with torch.no_grad():
        scores = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, longest, 8, True)[:2]
        expected = GRPOTrainer._get_per_token_logps_and_entropies(trainer, trainer.model, ids, mask, longest, 8, True)
    for values, trls in zip(scores, expected[:2], strict=True):
        assert values.dtype == torch.float32
        torch.testing.assert_close(values, (trls * mask[:, -longest:]).float(), atol=1e-4, rtol=0)


def test_what_an_update_and_a_rollout_leave_in_the_cache_goes_back_before_and_after_sampling(trainer, monkeypatch):
    events = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("freed"))
    hook = trainer.model.register_forward_pre_hook(lambda *_: events.append("sampled"))
    trainer._generate_single_turn([[5, 6, 7]], None, {}, num_generations=1)
    hook.remove()
    assert (events[0], events[1], events[-2], events[-1]) == ("freed", "sampled", "sampled", "freed")


LORA = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")}
TORN = {**SMALL, "num_iterations": 2}
# The entropy of the third step is above the target.
ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef_delta": 0.05, "entropy_target": 4.495}
ADAPTIVE |= {"entropy_coef": 0.1, "top_entropy_quantile": 0.5}
# The rewards, the settings of both trainers, and those of ours alone.
RUNS = {
    "defaults": (letters, {}, {}),
    "a plain GRPOConfig": (letters, {}, {"config_class": GRPOConfig}),
    "two updates a rollout, with kl": (
        letters,
        {"num_iterations": 2, "gradient_accumulation_steps": 2, "beta": 0.1},
        {},
    ),
    "rollouts older than the policy": (letters, {"steps_per_generation": 4, "gradient_accumulation_steps": 2}, {}),
    "grpo": (sparse, {"loss_type": "grpo"}, {}),
    "bnpo, accumulated": (letters, {"loss_type": "bnpo", "gradient_accumulation_steps": 2}, {}),
    "dr_grpo": (letters, {"loss_type": "dr_grpo", "scale_rewards": "none"}, {}),
    "cispo": (letters, {"loss_type": "cispo", "num_iterations": 2}, {}),
    "luspo by sequence": (letters, {"loss_type": "luspo", "importance_sampling_level": "sequence"}, {}),
    "sapo": (sparse, {"loss_type": "sapo"}, {}),
    "entropy bonus": (letters, {"entropy_coef": 0.01}, {}),
    "adaptive entropy bonus, high-entropy tokens": (letters, ADAPTIVE, {}),
    "truncated completions masked": (letters, {"mask_truncated_completions": True}, {}),
    "batch deviation": (sparse, {"scale_rewards": "batch"}, {}),
    "groups torn over small micro-batches": (letters, {**SMALL, "beta": 0.1}, {}),
    "grpo in small micro-batches, MLP in tiles": (
        sparse,
        {**SMALL, "loss_type": "grpo", "gradient_checkpointing": True},
        {},
    ),
    "bnpo in small micro-batches": (sparse, {**SMALL, "loss_type": "bnpo"}, {}),
    "rollouts of three micro-batches, steps of two": (letters, {**SMALL, "steps_per_generation": 6}, {}),
    "less than a group a pass": (sparse, {**TORN, "beta": 0.05}, {"max_tokens_per_micro_batch": 20}),
    "about a group a pass": (sparse, {**TORN, "loss_type": "bnpo"}, {"max_tokens_per_micro_batch": 60}),
    "all rows in one pass": (letters, {**TORN, "loss_type": "dr_grpo"}, {"max_tokens_per_micro_batch": 10_000}),
    "LoRA, with kl": (letters, {**TORN, **LORA, "beta": 0.5}, {}),
    "LoRA, not packed": (letters, LORA, {"pack_updates": False}),
    "grpo, sampled by a vLLM": (letters, {**SMALL, "loss_type": "grpo"}, {}),
    "vespo, sampled by a vLLM": (letters, {**SMALL, "loss_type": "vespo"}, {}),
    "a surrogate of a user, sampled by a vLLM": (letters, SMALL, {"surrogate": "small_trainers:clip"}),
    "a surrogate of a user": (letters, {"num_iterations": 3, "beta": 0.1}, {"surrogate": "small_trainers:clip"}),
    "an advantage of a user": (letters, SMALL, {"baseline": "small_trainers:group_mean"}),
}


@pytest.mark.full(
    keep=["a plain", "less than a group", "[LoRA", "user, sampled", "adaptive", "grpo in small", "of three"]
)
@pytest.mark.parametrize("run", RUNS)
def test_three_steps_end_with_trls_weights_and_log_its_figures(run, trl_run, ours, monkeypatch):
    rewards, settings, extra = RUNS[run]
    apart = "vLLM" in run
    trl = trl_run(rewards, settings, apart)
    monkeypatch.setattr(tiled_mlp, "MIN_TOKENS", 8 if "tiles" in run else tiled_mlp.MIN_TOKENS)
    trainer = ours(rewards, **STEPS, **settings, **extra)
    if apart:
        sample_apart(trainer)
    passes = []
    look = of_library(lambda m, args, kwargs: passes.append(kwargs))
    trainer.model.register_forward_pre_hook(look, with_kwargs=True)
    of_weights, of_log = differences(train(trainer), trl)
    # As a share of the way. By rounding, a token at the quantile of entropies may fall on either side of it.
    assert of_weights < (1e-4 if "entropy" in run else 1e-5)
    assert of_log < 1e-4
    packed = [kwargs["input_ids"].numel() for kwargs in passes if "packed_groups" in kwargs]
    assert bool(packed) != ("not packed" in run)
    # One completion of 12 tokens with its prompt of 15, whose last token goes with it, stays whole.
    assert max(packed, default=0) <= max(26, extra.get("max_tokens_per_micro_batch", 10_000))


def gradient_of_update(trainer, batches, packs):
    """The gradient of an optimizer step on TRL's micro-batches, as they are or packed."""
    updates, scorer = trainer.grpo_math.updates, trainer.grpo_math.scorer
    packed = scorer.packed
    trainer.model.zero_grad()
    scorer.packed = packed if packs else None
    step = updates.new_step()
    for planned in updates._gather_planned(batches, step):
        updates._accumulated_loss(trainer.model, planned, step).backward()
    scorer.packed = packed
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


def test_each_surrogate_with_each_reduction_has_one_gradient_packed_and_unpacked(ours):
    bounds = {"dppo_high": 0.02, "dppo_low": 0.02, "max_tokens_per_micro_batch": 40}
    trainer = ours(letters, **SMALL, **bounds, loss_type="prompt_mean", num_iterations=2)
    trainer.model.train()
    trainer.grpo_math.scorer.agree_to_pack()
    trainer.current_gradient_accumulation_steps = 4
    trainer._prepare_inputs([{"prompt": prompt} for prompt in ("3 + 4?", "Hello") for _ in range(4)])
    noise = torch.Generator().manual_seed(0)
    batches = [dict(rows) for rows in trainer._buffered_inputs]
    for rows in batches:
        # Far from the policy, so that each surrogate clips or drops some tokens.
        old = rows["old_per_token_logps"]
        rows["old_per_token_logps"] = old + 0.5 * torch.randn(old.shape, generator=noise)
    seen = []
    for surrogate, loss_type in product([*SURROGATES, "small_trainers:clip"], REDUCTIONS):
        trainer.args.surrogate, trainer.loss_type = surrogate, loss_type
        packed, unpacked = (gradient_of_update(trainer, batches, packs) for packs in (True, False))
        assert relative(packed, unpacked) < 1e-5, (surrogate, loss_type)
        seen.append(packed)
    # The user's clip is the clip: the last pairs are known.
    different = [a for i, a in enumerate(seen) if all(relative(a, b) > 1e-4 for b in seen[:i])]
    assert len(different) == len(SURROGATES) * len(REDUCTIONS)


def test_an_evaluation_is_the_mean_over_its_prompts(ours):
    trainer = ours(letters, loss_type="prompt_mean", eval_dataset=None, num_generations_eval=2)
    trainer.model.eval()
    rows = trainer._prepare_inputs([{"prompt": prompt} for prompt in ("3 + 4?", "Hello") for _ in range(2)])
    tokens, values = rows["completion_mask"], -rows["advantages"][:, None].expand_as(rows["completion_mask"])
    means = [(values[i : i + 2] * tokens[i : i + 2]).sum() / tokens[i : i + 2].sum() for i in (0, 2)]
    torch.testing.assert_close(trainer._compute_loss(trainer.model, rows), sum(means) / 2)


UNPACKED = {
    "attention implementation 'eager'": {"model_init_kwargs": {"attn_implementation": "eager"}},
    "torch_compile": {"torch_compile": True, "torch_compile_backend": "eager"},
    "an adapter whose effect depends on the whole row (PROMPT_TUNING)": {
        "peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    },
    "an adapter whose effect depends on the whole row (LORA with alora_invocation_tokens)": {
        "peft_config": LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[7])
    },
    "an adapter whose effect depends on the whole row (POLY)": {
        "peft_config": PolyConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    },
}


@pytest.mark.parametrize("reason", UNPACKED)
def test_what_cannot_be_packed_is_scored_as_trl_does_with_a_line_that_says_so(reason, ours, caplog, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # which transformers overwrites for good
    trainer = ours(config_class=GRPOConfig, **UNPACKED[reason])
    assert trainer.grpo_math.scorer.packed is None
    assert f"LlamaForCausalLM has {reason}" in caplog.text
    assert "packed" not in trainer.model.config._attn_implementation

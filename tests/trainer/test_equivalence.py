"""What is fast here is what TRL computes: log-probs, gradients, completions, and whole training runs.

The reference is TRL's own method on the same trainer, or TRL's own trainer on the same seed; float32, dropout off.
"""

from __future__ import annotations

import pytest
import torch
from small_trainers import PROMPTS, SMALL, letters, make, padded_batch, relative, weights
from trl import GRPOConfig, GRPOTrainer

from grpo_math.generation.decoding import lean_generation
from grpo_math.trainer import attention
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer

FAMILIES = ("llama", "qwen2", "qwen3", "gemma")


SHAPES = {
    "one group": ([7], 4, [5, 3, 9, 1]),
    "many groups of different prompts": ([7, 3, 12], 4, [5, 3, 9, 1]),
    "groups of one": ([4, 9, 2], 1, [6, 2]),
    "a group of sixteen": ([5], 16, [1, 2, 3, 4, 5, 6, 7, 8]),
    "one-token completions": ([6, 2], 3, [1]),
    "one-token prompts": ([1, 1], 4, [4, 2, 7]),
    "empty completions among others": ([5, 8], 3, [4, 0, 2]),
    "lengths far apart": ([6], 5, [40, 1, 39, 3, 38]),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_scoring_gives_trls_log_probs_entropies_and_gradients(family, shape, tiny, tokenizer, tmp_path):
    trainer = make(MathGRPOTrainer, MathGRPOConfig, tiny(family), tokenizer, tmp_path)
    assert trainer.scorer is not None
    ids, mask, longest = padded_batch(*SHAPES[shape])
    scored = mask[:, -longest:].bool()
    weights = torch.randn(scored.shape, generator=torch.Generator().manual_seed(1)) * scored
    results = []
    for kind in (GRPOTrainer, MathGRPOTrainer):
        trainer.model.zero_grad()
        logps, entropies, _ = kind._get_per_token_logps_and_entropies(
            trainer, trainer.model, ids, mask, longest, compute_entropy=True
        )
        (logps * weights).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
        results.append((logps.detach() * scored, entropies.detach() * scored, gradient))
    (plain_logps, plain_entropies, plain_gradient), (logps, entropies, gradient) = results
    assert logps.shape == plain_logps.shape
    torch.testing.assert_close(logps, plain_logps, atol=1e-4, rtol=0)
    torch.testing.assert_close(entropies, plain_entropies, atol=1e-4, rtol=0)
    assert relative(gradient, plain_gradient) < 1e-5


@pytest.mark.slow
def test_scoring_in_chunks_and_with_checkpointing_gives_the_same(tiny, tokenizer, tmp_path):
    ids, mask, longest = padded_batch([7, 3, 12], 4, [5, 3, 9, 1])
    gradients = []
    for checkpointing, chunk in ((False, None), (True, None), (False, 5)):
        trainer = make(
            MathGRPOTrainer, MathGRPOConfig, tiny("llama"), tokenizer, tmp_path, gradient_checkpointing=checkpointing
        )
        if checkpointing:
            trainer.model.gradient_checkpointing_enable()
        trainer.model.train()
        logps, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, longest, batch_size=chunk)
        logps.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters()]))
    assert relative(gradients[1], gradients[0]) < 1e-5
    assert relative(gradients[2], gradients[0]) < 1e-5


def test_the_packed_row_has_each_prompt_once_and_no_padding(tiny, tokenizer, tmp_path):
    trainer = make(MathGRPOTrainer, MathGRPOConfig, tiny("llama"), tokenizer, tmp_path)
    ids, mask, longest = padded_batch([7, 3], 4, [5, 3, 9, 1])
    seen = []
    trainer.model.register_forward_pre_hook(lambda m, a, k: seen.append(k["input_ids"].shape), with_kwargs=True)
    trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, longest)
    assert seen == [(1, (7 - 1) + (3 - 1) + 2 * (5 + 3 + 9 + 1))]


def test_a_row_by_itself_is_packed_too_since_then_it_needs_no_mask(tiny, tokenizer, tmp_path):
    trainer = make(MathGRPOTrainer, MathGRPOConfig, tiny("llama"), tokenizer, tmp_path)
    ids, mask, longest = padded_batch([7], 1, [60])
    called = attention.calls
    trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, longest)
    assert attention.calls > called


def test_what_an_update_has_left_in_the_cache_goes_back_before_a_rollout(tiny, tokenizer, tmp_path, monkeypatch):
    trainer = make(MathGRPOTrainer, MathGRPOConfig, tiny("llama"), tokenizer, tmp_path)
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("given back"))
    trainer.model.register_forward_pre_hook(lambda *args: order.append("forward"))
    trainer._generate_single_turn([[5, 6, 7]], None, {}, num_generations=1)
    assert (order[0], order[-1], order.count("given back")) == ("given back", "given back", 2)
    assert "forward" in order


@pytest.mark.parametrize("family", FAMILIES)
def test_a_lean_generation_gives_the_same_greedy_tokens_and_runs_each_prompt_once(family, tiny, tokenizer):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny(family))
    inputs = tokenizer([p for p in PROMPTS for _ in range(4)], return_tensors="pt", padding=True)
    plain = model.generate(**inputs, max_new_tokens=10, do_sample=False)
    shapes = []
    hook = model.register_forward_pre_hook(lambda m, a, k: shapes.append(k["input_ids"].shape), with_kwargs=True)
    with lean_generation(model):
        shared = model.generate(**inputs, max_new_tokens=10, do_sample=False)
    hook.remove()
    assert torch.equal(plain, shared)
    assert shapes[0] == (4, inputs["input_ids"].size(1))
    assert all(rows <= 16 and width == 1 for rows, width in shapes[1:])
    assert "generate" not in model.__dict__


RUNS = {
    "defaults": {},
    "kl": {"beta": 0.1},
    "two updates a rollout": {"num_iterations": 2, "gradient_accumulation_steps": 2},
    "rollouts older than the policy": {"steps_per_generation": 4, "gradient_accumulation_steps": 2},
    "grpo": {"loss_type": "grpo"},
    "bnpo, accumulated": {"loss_type": "bnpo", "gradient_accumulation_steps": 2},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "cispo": {"loss_type": "cispo", "num_iterations": 2},
    "luspo by sequence": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "sapo": {"loss_type": "sapo"},
    "entropy bonus": {"entropy_coef": 0.01},
    "high-entropy tokens": {"top_entropy_quantile": 0.5},
    "truncated completions masked": {"mask_truncated_completions": True},
    "batch deviation": {"scale_rewards": "batch"},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "groups torn over small micro-batches": SMALL,
    "the same, with kl": {**SMALL, "beta": 0.1},
    "grpo in small micro-batches": {**SMALL, "loss_type": "grpo"},
    "bnpo in small micro-batches": {**SMALL, "loss_type": "bnpo"},
    "dr_grpo in small micro-batches": {**SMALL, "loss_type": "dr_grpo"},
    "luspo in small micro-batches": {**SMALL, "loss_type": "luspo", "importance_sampling_level": "sequence"},
    "rollouts of three micro-batches, steps of two": {
        **SMALL,
        "steps_per_generation": 6,
        "gradient_accumulation_steps": 4,
    },
}
# Tokens in one pass: less than a group, about a group, and all rows in one. 0 is TRL's own number.
BUDGETS = (20, 60, 10_000)


def sparse(completions, **columns):
    """Half of the groups get equal rewards: they move no weight, and packing skips them."""
    groups = [completions[i : i + 4] for i in range(0, len(completions), 4)]
    return [float(len(t) % 3) if "".join(g) > "K" else 1.0 for g in groups for t in g]


@pytest.mark.full(keep=["dense-kl]", "sparse-grpo]", "dense-two updates"])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("rewards", [letters, sparse], ids=["dense", "sparse"])
def test_five_steps_end_with_trls_weights(run, rewards, trl_weights, tiny, tokenizer, tmp_path):
    before, plain = trl_weights(rewards, RUNS[run])
    extra = {"advantage_eps": 1e-4, **RUNS[run]}
    trainer = make(MathGRPOTrainer, MathGRPOConfig, tiny("llama"), tokenizer, tmp_path, rewards, **extra)
    trainer.train()
    assert relative(plain, before) > 1e-4, "nothing was trained"
    # By rounding, a token at the quantile of entropies may fall on either side of it.
    assert relative(weights(trainer.model), plain) < (1e-5 if "entropy" in run else 1e-6)


@pytest.mark.full
def test_five_steps_of_lora_on_the_real_model_end_with_trls_adapter(smollm, tokenizer, tmp_path):
    from peft import LoraConfig

    adapters = []
    for kind, settings in ((GRPOTrainer, GRPOConfig), (MathGRPOTrainer, MathGRPOConfig)):
        trainer = make(
            kind,
            settings,
            smollm,
            tokenizer,
            tmp_path,
            max_completion_length=6,
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
            **({"advantage_eps": 1e-4} if settings is MathGRPOConfig else {}),
        )
        trainer.train()
        adapters.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters() if p.requires_grad]))
    assert relative(adapters[1], adapters[0]) < 1e-5


@pytest.mark.full(keep=["dense-dapo-20"])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo"])
@pytest.mark.parametrize("rewards", [letters, sparse], ids=["dense", "sparse"])
def test_a_token_budget_changes_no_weight(budget, loss_type, rewards, trl_weights, tiny, tokenizer, tmp_path):
    settings = {**SMALL, "loss_type": loss_type, "beta": 0.05 if rewards is letters else 0.0, "num_iterations": 2}
    own = {"advantage_eps": 1e-4, "update_token_budget": budget}
    trainer = make(MathGRPOTrainer, MathGRPOConfig, tiny("llama"), tokenizer, tmp_path, rewards, **settings, **own)
    passes = []
    trainer.model.register_forward_pre_hook(lambda m, args, kwargs: passes.append(kwargs), with_kwargs=True)
    trainer.train()
    packed = [seen for seen in passes if "packed_groups" in seen]
    assert packed
    for seen in packed:
        one_row = sum(len(group.lengths) for group in seen["packed_groups"]) == 1
        assert seen["input_ids"].numel() <= budget or one_row
    assert relative(weights(trainer.model), trl_weights(rewards, settings)[1]) < 1e-6


@pytest.mark.full
def test_a_plain_grpo_config_trains_as_trl_does(tiny, tokenizer, tmp_path):
    runs = []
    for kind in (GRPOTrainer, MathGRPOTrainer):
        trainer = make(kind, GRPOConfig, tiny("llama"), tokenizer, tmp_path)
        trainer.train()
        runs.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert relative(runs[1], runs[0]) < 1e-6


def test_what_packing_cannot_honour_is_scored_the_plain_way_and_said(tiny, tokenizer, tmp_path, caplog):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny("llama"), attn_implementation="eager")
    trainer = make(MathGRPOTrainer, MathGRPOConfig, model, tokenizer, tmp_path)
    assert trainer.scorer is None
    assert "attention implementation 'eager'" in caplog.text
    assert trainer.model.config._attn_implementation == "eager"


def test_what_is_compiled_is_scored_the_plain_way_under_a_config_that_cannot_say_so(
    tiny, tokenizer, tmp_path, caplog, monkeypatch
):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # which transformers overwrites for good
    settings = {"torch_compile": True, "torch_compile_backend": "eager"}
    trainer = make(MathGRPOTrainer, GRPOConfig, tiny("llama"), tokenizer, tmp_path, **settings)
    assert trainer.scorer is None
    assert "LlamaForCausalLM has torch_compile" in caplog.text


@pytest.mark.full
def test_pack_updates_false_leaves_the_model_as_it_is(tiny, tokenizer, tmp_path):
    trainer = make(MathGRPOTrainer, MathGRPOConfig, tiny("llama"), tokenizer, tmp_path, pack_updates=False)
    assert trainer.model.config._attn_implementation != attention.NAME
    trainer.train()


@pytest.mark.slow
def test_beams_are_left_to_transformers(tiny, tokenizer, tmp_path):
    """Beams repeat the rows inside `generate`: a cache of our own would not fit them."""
    kwargs = {"generation_kwargs": {"num_beams": 2, "do_sample": False}, "max_steps": 1}
    make(MathGRPOTrainer, MathGRPOConfig, tiny("llama"), tokenizer, tmp_path, **kwargs).train()


@pytest.mark.slow
def test_a_prompt_learning_adapter_is_scored_the_plain_way(tiny, tokenizer, tmp_path, caplog):
    from peft import PromptTuningConfig

    adapter = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    trainer = make(
        MathGRPOTrainer, MathGRPOConfig, tiny("llama"), tokenizer, tmp_path, peft_config=adapter, max_steps=1
    )
    assert trainer.scorer is None
    assert "a prompt-learning adapter" in caplog.text
    trainer.train()

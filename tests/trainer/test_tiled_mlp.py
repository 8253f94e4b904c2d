"""An MLP in tiles gives the gradients of the whole one, with no more matrix products, and is never whole in backward.

The reference is TRL's own method, or the same trainer with tiles longer than its rows; float32.
"""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from small_trainers import SMALL, letters, make, padded_batch, relative, weights
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from trl import GRPOTrainer

from grpo_math.trainer import tiled_mlp
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer

WHOLE, SMALL_TILE, WIDTH = 10**9, 8, 48  # WIDTH: the MLP's in `tiny`
SHAPES = {
    "one group": ([7], 4, [5, 3, 9, 1]),
    "many groups of different prompts": ([7, 3, 12], 4, [5, 3, 9, 1]),
    "lengths far apart, and none": ([6], 5, [40, 1, 39, 0, 38]),
}


def trainer_of(model, tokenizer, folder, targets=None, dropout=0.0, **settings):
    """In training mode, with checkpointing; a LoRA on ``targets`` whose two halves are not zero."""
    lora = LoraConfig(r=4, target_modules=targets, lora_dropout=dropout, task_type="CAUSAL_LM") if targets else None
    settings = {"gradient_checkpointing": True, **settings}
    trainer = make(MathGRPOTrainer, MathGRPOConfig, model, tokenizer, folder, peft_config=lora, **settings)
    trainer.model.train()
    if settings["gradient_checkpointing"]:
        trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    return trainer


def gradient_of(trainer, shape=SHAPES["one group"], kind=MathGRPOTrainer):
    ids, mask, longest = padded_batch(*shape)
    scored = mask[:, -longest:].bool()
    factors = torch.randn(scored.shape, generator=torch.Generator().manual_seed(1)) * scored
    trainer.model.zero_grad()
    logps, _, _ = kind._get_per_token_logps_and_entropies(trainer, trainer.model, ids, mask, longest)
    (logps * factors).sum().backward()
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.requires_grad])


class Widest(TorchDispatchMode):
    """The most tokens in a tensor as wide as the MLP."""

    def __init__(self):
        super().__init__()
        self.tokens = 0

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() and out.size(-1) == WIDTH:
            self.tokens = max(self.tokens, out.numel() // WIDTH)
        return out


def widest(trainer, shape=SHAPES["one group"]):
    with Widest() as mode:
        gradient_of(trainer, shape)
    return mode.tokens


@pytest.mark.slow
@pytest.mark.parametrize("targets", [None, "all-linear", ["q_proj", "v_proj"]], ids=["full", "all-linear", "q and v"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma"])
def test_gradients_in_tiles_are_trls(family, targets, tiny, tokenizer, tmp_path, monkeypatch):
    trainer = trainer_of(tiny(family), tokenizer, tmp_path, targets)
    for shape in SHAPES.values():
        monkeypatch.setattr(tiled_mlp, "MIN_TOKENS", WHOLE)
        plain = gradient_of(trainer, shape, GRPOTrainer)
        monkeypatch.setattr(tiled_mlp, "MIN_TOKENS", SMALL_TILE)
        assert relative(gradient_of(trainer, shape), plain) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("targets", [None, "all-linear", ["q_proj", "v_proj"]], ids=["full", "all-linear", "q and v"])
def test_the_mlp_is_never_whole_and_no_product_is_computed_more_often(targets, tiny, tokenizer, tmp_path, monkeypatch):
    trainer = trainer_of(tiny("llama"), tokenizer, tmp_path, targets)
    products = []
    for least in (WHOLE, SMALL_TILE):
        monkeypatch.setattr(tiled_mlp, "MIN_TOKENS", least)
        with FlopCounterMode(display=False) as counter:
            gradient_of(trainer)
        products.append(counter.get_total_flops())
    assert products[1] == products[0]
    tokens = (7 - 1) + 5 + 3 + 9 + 1  # of the packed row, in three tiles
    assert widest(trainer) <= max(tokens // 3, WIDTH)  # a weight has WIDTH rows
    monkeypatch.setattr(tiled_mlp, "MIN_TOKENS", WHOLE)
    long = ([60], 1, [60])
    assert widest(trainer, long) >= 100
    monkeypatch.setattr(tiled_mlp, "MIN_TOKENS", SMALL_TILE)
    assert widest(trainer, long) <= WIDTH


RUNS = {
    "many groups": {},
    "accumulated, with kl": {**SMALL, "beta": 0.1},
    "two updates a rollout": {"num_iterations": 2, "gradient_accumulation_steps": 2},
    "parts of a few tokens": {**SMALL, "update_token_budget": 40},
}


@pytest.mark.full
@pytest.mark.parametrize("run", RUNS)
def test_five_steps_in_tiles_end_with_trls_weights(run, trl_weights, tiny, tokenizer, tmp_path, monkeypatch):
    of_trl = {name: value for name, value in RUNS[run].items() if name != "update_token_budget"}
    before, plain = trl_weights(letters, of_trl)
    monkeypatch.setattr(tiled_mlp, "MIN_TOKENS", SMALL_TILE)
    extra = {"advantage_eps": 1e-4, "gradient_checkpointing": True, **RUNS[run]}
    trainer = make(MathGRPOTrainer, MathGRPOConfig, tiny("llama"), tokenizer, tmp_path, **extra)
    trainer.train()
    assert relative(plain, before) > 1e-4, "nothing was trained"
    assert relative(weights(trainer.model), plain) < 1e-6


def test_a_rollout_in_tiles_has_the_same_tokens(tiny, tokenizer, tmp_path, monkeypatch):
    trainer = trainer_of(tiny("llama"), tokenizer, tmp_path)
    inputs = tokenizer(["What is 3 + 4?", "Hello"] * 4, return_tensors="pt", padding=True)
    monkeypatch.setattr(tiled_mlp, "MIN_TOKENS", WHOLE)
    whole = trainer.model.generate(**inputs, max_new_tokens=10, do_sample=False)
    monkeypatch.setattr(tiled_mlp, "MIN_TOKENS", SMALL_TILE)
    assert torch.equal(trainer.model.generate(**inputs, max_new_tokens=10, do_sample=False), whole)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]], ids=["all-linear", "q and v"])
def test_a_4_bit_mlp_in_tiles_has_the_same_gradient(targets, tokenizer, tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    # Widths of 64, which bitsandbytes quantises in whole blocks.
    widths = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**widths, vocab_size=49152, eos_token_id=2)).save_pretrained(tmp_path / "model")
    kind = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    quantised = BitsAndBytesConfig(**kind, bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=quantised, dtype=torch.float32)
    trainer = trainer_of(model, tokenizer, tmp_path, targets)
    for name, parameter in trainer.model.named_parameters():
        if "lora_" in name:  # TRL makes a quantised model's adapter bfloat16
            parameter.data = parameter.data.float()
    monkeypatch.setattr(tiled_mlp, "MIN_TOKENS", WHOLE)
    plain = gradient_of(trainer)
    monkeypatch.setattr(tiled_mlp, "MIN_TOKENS", SMALL_TILE)
    seen = []
    trainer.model.base_model.model.model.layers[0].mlp.up_proj.register_forward_pre_hook(
        lambda module, args: seen.append(len(args[0]))
    )
    assert relative(gradient_of(trainer), plain) < 1e-5
    assert max(seen) < 24


def test_a_dropout_in_the_mlp_draws_the_same_again(tiny, tokenizer, tmp_path, monkeypatch):
    """The reference saves what the tiles of the first pass have computed, as far as torch's checkpointing does."""
    trainer = trainer_of(tiny("llama"), tokenizer, tmp_path, "all-linear", dropout=0.3)
    monkeypatch.setattr(tiled_mlp, "MIN_TOKENS", SMALL_TILE)
    torch.manual_seed(0)
    gradient, after = gradient_of(trainer), torch.rand(1)
    monkeypatch.setattr(tiled_mlp, "checkpoint", lambda function, *args, use_reentrant: function(*args))
    torch.manual_seed(0)
    assert relative(gradient, gradient_of(trainer)) < 1e-5
    assert torch.equal(after, torch.rand(1))
    torch.manual_seed(1)
    assert relative(gradient, gradient_of(trainer)) > 1e-2, "nothing was dropped"


def test_under_autocast_tiles_round_as_the_whole_does(tiny, tokenizer, tmp_path, monkeypatch):
    trainer = trainer_of(tiny("llama"), tokenizer, tmp_path, "all-linear")
    gradients = []
    for least in (WHOLE, SMALL_TILE):
        monkeypatch.setattr(tiled_mlp, "MIN_TOKENS", least)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ids, mask, longest = padded_batch(*SHAPES["one group"])
            trainer.model.zero_grad()
            logps, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, longest)
        logps.sum().backward()  # outside, as accelerate does it
        gradients.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.requires_grad]))
    assert relative(gradients[1], gradients[0]) < 5e-3


def test_hooks_around_it_and_a_second_backward_pass_are_served(tiny, tokenizer, tmp_path, monkeypatch):
    """As with activation offloading, which puts away what checkpointing keeps."""
    trainer = trainer_of(tiny("llama"), tokenizer, tmp_path)
    monkeypatch.setattr(tiled_mlp, "MIN_TOKENS", WHOLE)
    plain = gradient_of(trainer)
    monkeypatch.setattr(tiled_mlp, "MIN_TOKENS", SMALL_TILE)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        assert relative(gradient_of(trainer), plain) < 1e-5
    ids, mask, longest = padded_batch(*SHAPES["one group"])
    trainer.model.zero_grad()
    logps, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, longest)
    logps.sum().backward(retain_graph=True)
    once = [p.grad.clone() for p in trainer.model.parameters()]
    logps.sum().backward()
    for parameter, gradient in zip(trainer.model.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient)


def test_where_it_cannot_serve_the_mlp_stays_whole(tiny, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tiled_mlp, "MIN_TOKENS", SMALL_TILE)
    tokens = 7 - 1 + 5 + 3 + 9 + 1
    for name, served, kwargs in (
        ("tiles", True, {}),
        ("a dropout", True, {"targets": "all-linear", "dropout": 0.1}),
        ("use_reentrant", False, {"gradient_checkpointing_kwargs": {"use_reentrant": True}}),
        ("no checkpointing", False, {"gradient_checkpointing": False}),
    ):
        trainer = trainer_of(tiny("llama"), tokenizer, tmp_path, **kwargs)
        seen = []
        layer = next(module for module in trainer.model.modules() if hasattr(module, "mlp"))
        layer.mlp.gate_proj.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0]))
        gradient_of(trainer)
        assert (max(states.numel() // states.size(-1) for states in seen) < tokens) == served, name
        assert bool(trainer.tiled_layers) == served, name


def test_a_layer_with_a_norm_behind_its_mlp_is_left_alone():
    from transformers import (
        Gemma2Config,
        Gemma2ForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        Olmo2Config,
        Olmo2ForCausalLM,
    )

    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    for made, served in (
        (MistralForCausalLM(MistralConfig(**shape)), 1),
        (Gemma2ForCausalLM(Gemma2Config(**shape)), 0),
        (Olmo2ForCausalLM(Olmo2Config(**shape)), 0),
    ):
        assert tiled_mlp.set_up([made], in_updates=True) == served

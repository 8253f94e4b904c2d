"""An MLP in tiles gives the gradients of the whole one, with no more matrix products, and is never whole in backward.

The reference is TRL's own method, or the same trainer with tiles longer than its rows; float32.
"""

import pytest
import torch
from peft import LoraConfig
from small_families import scored, tiny_model
from small_trainers import relative
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import GRPOTrainer

from grpo_math.trainer import tiled_mlp
from grpo_math.trainer.trainer import MathGRPOTrainer

WHOLE, SMALL_TILE, WIDTH = 10**9, 8, 40  # WIDTH: the MLP's in `small`
SHAPES = {
    "one group": ([7], 4, [5, 3, 9, 1]),
    "many groups of different prompts": ([7, 3, 12], 4, [5, 3, 9, 1]),
    "lengths far apart, and none": ([6], 5, [40, 1, 39, 0, 38]),
}


def trainer_of(ours, targets=None, dropout=0.0, **settings):
    """In training mode, with checkpointing; a LoRA on ``targets`` whose two halves are not zero."""
    lora = LoraConfig(r=4, target_modules=targets, lora_dropout=dropout, init_lora_weights=False) if targets else None
    trainer = ours(peft_config=lora, **{"gradient_checkpointing": True, **settings})
    trainer.model.train()
    if trainer.args.gradient_checkpointing:
        trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    return trainer


@pytest.fixture(autouse=True)
def tiles_of_one_test(monkeypatch):
    monkeypatch.setattr(tiled_mlp, "MIN_TOKENS", SMALL_TILE)  # gives back what `gradient_of` sets


def gradient_of(trainer, shape=SHAPES["one group"], kind=MathGRPOTrainer, tile=SMALL_TILE, under=None):
    tiled_mlp.MIN_TOKENS = tile
    return scored(kind, trainer, *shape, under=under)[2]


class Widest(TorchDispatchMode):
    """The most tokens in a tensor as wide as the MLP."""

    tokens = 0

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() and out.size(-1) == WIDTH:
            self.tokens = max(self.tokens, out.numel() // WIDTH)
        return out


LONG = ([60], 1, [60])  # more tokens than a weight has rows


def widest(trainer, shape=SHAPES["one group"], tile=SMALL_TILE):
    with Widest() as mode:
        gradient_of(trainer, shape, tile=tile)
    return mode.tokens


TARGETS = {"full": None, "all-linear": "all-linear", "q and v": ["q_proj", "v_proj"]}


@pytest.mark.parametrize(
    ("family", "targets"),
    [("llama", "full"), ("llama", "all-linear"), ("llama", "q and v"), ("qwen2", "all-linear"), ("gemma", "full")],
)
def test_gradients_in_tiles_are_trls(family, targets, ours):
    trainer = trainer_of(ours, TARGETS[targets], model=tiny_model(family))
    for shape in SHAPES.values():
        plain = gradient_of(trainer, shape, GRPOTrainer, tile=WHOLE)
        assert relative(gradient_of(trainer, shape), plain) < 1e-5


def test_a_4_bit_base_has_trls_gradient_whole_and_in_tiles_and_trains(tiny, ours):
    pytest.importorskip("bitsandbytes")
    quantised = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=True,
    )
    model = AutoModelForCausalLM.from_pretrained(tiny("wide"), quantization_config=quantised, dtype=torch.float32)
    trainer = trainer_of(ours, "all-linear", model=model, max_steps=2)
    assert "Linear4bit" in str(trainer.model)
    assert trainer.tiled_layers == 2
    for name, parameter in trainer.model.named_parameters():
        if "lora_" in name:  # TRL makes a quantised model's adapter bfloat16, whose rounding would hide a difference
            parameter.data = parameter.data.float()
    plain = gradient_of(trainer, kind=GRPOTrainer, tile=WHOLE)
    trainer._agree_to_pack()  # in evaluation mode, in which bitsandbytes may repack the weights
    for tile in (WHOLE, SMALL_TILE):
        assert relative(gradient_of(trainer, tile=tile), plain) < 1e-5
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize(
    "targets", ["all-linear", *(pytest.param(one, marks=pytest.mark.slow) for one in ("full", "q and v"))]
)
def test_the_mlp_is_never_whole_and_no_product_is_computed_more_often(targets, ours):
    trainer = trainer_of(ours, TARGETS[targets])
    products = []
    for tile in (WHOLE, SMALL_TILE):
        with FlopCounterMode(display=False) as counter:
            gradient_of(trainer, tile=tile)
        products.append(counter.get_total_flops())
    assert products[1] == products[0]
    # 119 tokens whole, in two tiles, in three, and in four at most.
    assert [widest(trainer, LONG, tile) for tile in (WHOLE, 60, 59, 39, 8)] == [119, 119, 60, 40, 30]


def test_what_a_checkpoint_itself_saves_does_not_compute_tiles_again(ours, monkeypatch):
    """Before torch 2.13 `checkpoint` saves an empty tensor."""

    def saving(*args, use_reentrant):
        torch.ones(1, requires_grad=True).exp()
        return checkpoint(*args, use_reentrant=use_reentrant)

    monkeypatch.setattr(tiled_mlp, "checkpoint", saving)
    trainer = trainer_of(ours)
    products = []
    for tile in (WHOLE, SMALL_TILE):
        with FlopCounterMode(display=False) as counter:
            gradient_of(trainer, tile=tile)
        products.append(counter.get_total_flops())
    assert products[1] == products[0]


def test_a_dropout_in_the_mlp_draws_the_same_again(ours, monkeypatch):
    """The reference saves what the tiles of the first pass have computed, as far as torch's checkpointing does."""
    trainer = trainer_of(ours, "all-linear", dropout=0.3)
    torch.manual_seed(0)
    gradient, after = gradient_of(trainer), torch.rand(1)
    monkeypatch.setattr(tiled_mlp, "checkpoint", lambda function, *args, use_reentrant: function(*args))
    torch.manual_seed(0)
    assert relative(gradient, gradient_of(trainer)) < 1e-5
    assert torch.equal(after, torch.rand(1))
    torch.manual_seed(1)
    assert relative(gradient, gradient_of(trainer)) > 1e-2, "nothing was dropped"


CONTEXTS = {
    "autocast": (lambda: torch.autocast("cpu", dtype=torch.bfloat16), 5e-3),
    # As with activation offloading, which puts away what checkpointing keeps.
    "hooks of saved tensors": (lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t), 1e-5),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_under_autocast_and_hooks_tiles_compute_what_the_whole_does(context, ours):
    trainer = trainer_of(ours, "all-linear")
    under, bound = CONTEXTS[context]
    whole, tiles = (gradient_of(trainer, tile=tile, under=under()) for tile in (WHOLE, SMALL_TILE))
    assert relative(tiles, whole) < bound


@pytest.mark.parametrize(
    ("served", "kwargs"),
    [
        (True, {}),
        (True, {"targets": "all-linear", "dropout": 0.1}),
        (False, {"gradient_checkpointing_kwargs": {"use_reentrant": True}}),
        (False, {"gradient_checkpointing": False}),
    ],
)
def test_where_it_cannot_serve_the_mlp_stays_whole(served, kwargs, ours, caplog):
    trainer = trainer_of(ours, **kwargs)
    assert bool(trainer.tiled_layers) == served
    assert ("Switched off: tiled MLP: use_reentrant;" in caplog.text) == ("gradient_checkpointing_kwargs" in kwargs)
    assert (widest(trainer, LONG) <= WIDTH) == served


@pytest.mark.parametrize(("family", "served"), [("mistral", 2), ("gemma2", 0), ("olmo2", 0)])
def test_a_layer_with_a_norm_behind_its_mlp_is_left_alone(family, served):
    assert tiled_mlp.set_up([tiny_model(family)]) == served


def test_a_norm_that_does_not_feed_its_mlp_is_an_error():
    model = tiny_model("llama")
    states = torch.ones(1, 2, model.config.hidden_size)
    tiled_mlp.set_up([model])
    layer = model.model.layers[0]
    layer.mlp(layer.post_attention_layernorm(states))
    layer.post_attention_layernorm(states)
    with pytest.raises(RuntimeError, match="the norm of LlamaDecoderLayer does not feed its MLP"):
        layer.mlp(states.clone())

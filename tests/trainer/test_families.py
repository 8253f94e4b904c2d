"""Model families: packed to TRL's numbers, or scored the plain way with a line that says why. Tiny random models."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from small_families import compared, tiny_model, try_first
from small_generation import counted
from small_trainers import KINDS, PROMPTS, relative, weights
from transformers import AutoConfig
from trl import GRPOConfig

from grpo_math.errors import ConfigError
from grpo_math.generation.decoding import lean_generation
from grpo_math.generation.names import experts_for_trl

PACKED = (
    *("cohere", "deepseek_v3", "gemma2", "gemma3", "gpt_neox", "gpt_oss", "mistral", "mixtral", "opt", "phi3"),
    *("falcon_h1", "granitemoehybrid", "lfm2", "mamba2", "nemotron_h", "qwen3_next", "zamba2"),
)
SAMPLED_PLAIN = ("falcon_h1", "nemotron_h", "zamba2")  # generation is left to transformers
PLAIN = {
    "falcon": "its own attention",
    "diffllama": "2 layers and 4 calls of packed attention",
    "nemotron": "2 layers and 0 calls of packed attention",
    "falcon_mamba": "layers (FalconMambaMixer) whose code ignores how a row is packed",
    "minimax": "1 layers with a state, of which 0 continue a prompt's state",
    "stablelm": "2 layers and 0 calls of packed attention",
    # Positions that the model counts itself.
    **dict.fromkeys(("roberta", "bart"), "log-probs that change by"),
}


# Before, a layer of LFM2 gives its convolution no arguments of the pass: such a model is scored the plain way.
IS_OLD = Version(transformers.__version__) < Version("5.18")
PLAIN_IF_OLD = ("lfm2",)


def scored_alike(trainer, *rows):
    logps, gradient = compared(trainer, *rows)
    assert logps < 1e-4
    assert gradient < 1e-5


@pytest.mark.full(keep=["gemma2", "lfm2", "qwen3_next"])
@pytest.mark.parametrize("family", PACKED)
def test_a_family_that_is_packed_has_trls_log_probs_gradients_and_completions(family, ours, chars):
    model = tiny_model(family)
    if IS_OLD and family in PLAIN_IF_OLD:
        trainer = ours(model=model)
        trainer._agree_to_pack()
        assert trainer.scorer is None
        return
    inputs = chars([p for p in PROMPTS for _ in range(2)], return_tensors="pt", padding=True)
    plain = model.generate(**inputs, max_new_tokens=6, do_sample=False, use_cache=True)
    trainer = ours(model=model)
    # Some shorter than a convolution, one longer than a chunk, and completions of one token.
    for rows in (((7, 3, 12),), ((1, 2, 7),), ((70,),), ((7, 3), 4, (1,))):
        scored_alike(trainer, *rows)
    assert trainer.scorer is not None
    with counted(model) as shapes, lean_generation(model):
        assert torch.equal(model.generate(**inputs, max_new_tokens=6, do_sample=False, use_cache=True), plain)
    # transformers 5.17 gives Gemma 3 a cache from which rows can be dropped.
    if family != "gemma3":
        assert (shapes[0][0] == len(PROMPTS)) == (family not in SAMPLED_PLAIN)


@pytest.mark.full(keep=["mixtral", "granitemoe-0.5"])
@pytest.mark.parametrize("coefficient", [None, 0.5])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "granitemoe"])
def test_a_mixture_of_experts_is_packed_and_ends_with_trls_weights_and_auxiliary_loss(family, coefficient, ours):
    if IS_OLD and family == "granitemoe" and coefficient:
        pytest.skip("TRL's trainer fails: this version of Granite returns no router logits")
    runs, attribute_map = {}, dict(AutoConfig.for_model(family).attribute_map)
    for kind in ("ours", "trl"):
        # Completions that are cut have no token to score, and their prompts count.
        settings = {"router_aux_loss_coef": coefficient, "mask_truncated_completions": True, "max_steps": 1}
        model, passes = tiny_model(family), []
        model.register_forward_pre_hook(
            lambda m, a, kw, to=passes: to.append(kw["input_ids"].numel() * torch.is_grad_enabled()), with_kwargs=True
        )
        trainer = ours(model=model, folder=kind, **KINDS[kind], **settings, gradient_accumulation_steps=2)
        before, names = weights(model), set(model.config.to_dict())
        # TRL's own trainer fails with Granite, whose config has another name.
        with nullcontext() if kind == "ours" else experts_for_trl(model.config):
            trainer.train()
        assert set(model.config.to_dict()) == names
        assert type(model.config)().attribute_map == attribute_map
        log = [line["aux_loss"] for line in trainer.state.log_history if "aux_loss" in line]
        runs[kind] = weights(model) - before, log, sum(passes)
    (change, log, tokens), (plain_change, plain_log, plain_tokens) = runs.values()
    assert relative(change, plain_change) < 1e-5
    assert log == pytest.approx(plain_log, abs=1e-5)
    assert tokens < 0.8 * plain_tokens


@pytest.mark.full(keep=["diffllama", "falcon", "roberta", "bart"])
@pytest.mark.parametrize("family", PLAIN)
def test_a_family_that_cannot_be_packed_is_scored_the_plain_way_and_named_once(family, ours, caplog):
    reason, model = PLAIN[family], tiny_model(family)
    trainer = ours(model=model)
    try_first(trainer)
    scored_alike(trainer, (7, 3, 12))
    assert (trainer.scorer, trainer.budget.splits) == (None, False)
    assert caplog.text.count(f"Switched off: packing: {type(model).__name__} has {reason}") == 1


PAGE = (Path(__file__).parents[2] / "docs/reference.md").read_text()
IN_DOCS = [name for row in re.findall(r"^\| packed[^|]*\|(.*)\|$", PAGE, re.M) for name in row.strip().split(", ")]
NOT_TRIED = {"kimi_linear"}  # has no config at these sizes
WRONG = ("bart", "blenderbot-small", "camembert", "marian", "pegasus", "plbart", "roberta", "xlm-roberta")


@pytest.mark.full(keep=["[plbart", "[roberta", "[llama]", "[gemma4]", "[flex_olmo"])
@pytest.mark.parametrize("family", [*(name for name in IN_DOCS if name not in NOT_TRIED), *WRONG])
def test_bfloat16_packs_the_same_families_as_float32(family, ours):
    trainer = ours(model=tiny_model(family).to(torch.bfloat16))
    trainer._agree_to_pack()
    assert (trainer.scorer is not None) == (family in IN_DOCS and not (IS_OLD and family in PLAIN_IF_OLD))


@pytest.mark.parametrize("settings", [{"neftune_noise_alpha": 5.0}, {"optim": "galore_adamw_layerwise"}], ids=str)
def test_what_depends_on_the_length_or_number_of_passes_is_not_packed(settings, trainer_in, tmp_path):
    trainer = trainer_in(tmp_path, config_class=GRPOConfig, **settings)  # whose settings no rule reads
    assert trainer.scorer is None


def test_an_optimizer_in_the_hooks_of_a_script_is_not_packed(ours):
    model = tiny_model("llama")
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(torch.optim.SGD([weight]).step)
    assert ours(model=model).scorer is None


def test_ddp_looks_for_unused_parameters_if_a_text_leaves_a_tower_unused(ours, monkeypatch):
    for family in ("llama", "gemma3"):
        trainer = ours(model=tiny_model(family), gradient_checkpointing=True)
        assert trainer.accelerator.ddp_handler.find_unused_parameters == (family == "gemma3")
    trainer.args.gradient_checkpointing_kwargs = {"use_reentrant": True}
    trainer._set_up_updates()
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    with pytest.raises(ConfigError, match="vision tower gets no gradient: set use_reentrant to false"):
        trainer._set_up_updates()


def test_float32_weights_are_compared_without_autocast(ours):
    for family in ("llama", "plbart"):
        trainer = ours(model=tiny_model(family), bf16=True, max_steps=1)
        trainer.train()
        assert (trainer.scorer is not None) == (family == "llama")


@pytest.mark.full
def test_the_rounding_of_half_precision_is_not_taken_for_a_model_that_cannot_be_packed(smollm, tokenizer, ours):
    trainer = ours(model=smollm, tokenizer=tokenizer, model_init_kwargs={"dtype": "bfloat16"})
    try_first(trainer)
    assert trainer.scorer is not None

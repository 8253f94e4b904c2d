"""Settings: the dtype of the weights, refused values, and functions of a user."""

from contextlib import suppress
from dataclasses import make_dataclass

import pytest
import torch
from small_families import tiny_model
from small_trainers import KINDS, config, letters, make
from transformers import HfArgumentParser
from transformers.hf_argparser import HfArg
from trl import GRPOConfig, ModelConfig, ScriptArguments, TrlParser

from grpo_math.errors import ConfigError, UserError
from grpo_math.report.run_dir import read_run
from grpo_math.settings.fields import TRL_FACTS, fields
from grpo_math.settings.recipe import read
from grpo_math.trainer import build
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.recipe_settings import build as build_settings
from grpo_math.trainer.trainer import MathGRPOTrainer


@pytest.mark.parametrize(("lora", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_auto_keeps_float32_for_weights_that_adamw_trains_without_a_copy(
    lora, dtype, small, chars, tmp_path, monkeypatch
):
    monkeypatch.setattr(build, "fast_dtype", lambda use_cpu: "bfloat16")
    model = ModelConfig(small, dtype="auto", use_peft=lora, lora_target_modules=["q_proj", "v_proj"])
    trainer = build.build_trainer(config(MathGRPOConfig, tmp_path), model, [{"prompt": "x"}] * 4, chars, [letters])
    assert trainer.model.get_input_embeddings().weight.dtype == dtype


def test_a_recipe_saves_no_pickle_of_its_settings_and_no_card_of_trls(small, chars, tmp_path):
    settings = config(MathGRPOConfig, tmp_path, max_steps=1, save_strategy="steps")
    build.build_trainer(settings, ModelConfig(small, dtype="float32"), [{"prompt": "x"}] * 4, chars, [letters]).train()
    saved = {path.name for path in tmp_path.rglob("*")}
    assert {"checkpoint-1", "optimizer.pt"} < saved
    assert not {"training_args.bin", "README.md"} & saved


def test_dropout_with_stacked_experts_is_one_line(chars, tmp_path):
    tiny_model("mixtral").save_pretrained(tmp_path / "mixtral")
    model = ModelConfig(str(tmp_path / "mixtral"), use_peft=True, lora_target_modules="all-linear", lora_dropout=0.1)
    with pytest.raises(
        UserError, match=r"lora_dropout above 0 does not work with the stacked experts .*: set it to 0.0"
    ):
        build.build_trainer(config(MathGRPOConfig, tmp_path), model, [{"prompt": "x"}] * 4, chars, [letters])


def test_a_log_level_may_be_in_capitals_as_those_of_logging_are(tmp_path):
    assert config(MathGRPOConfig, tmp_path, log_level="WARNING").log_level == "warning"


@pytest.mark.parametrize("computes", [True, False])
def test_a_card_that_only_emulates_bfloat16_trains_in_float32(computes, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or computes
    )
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    # transformers keeps its answer for the process.
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    assert config(MathGRPOConfig, tmp_path, bf16=None, use_cpu=False).bf16 is computes
    assert not config(MathGRPOConfig, tmp_path, bf16=None, use_cpu=True).bf16


MODULE = """
def max_rl(rewards):
    mean = rewards.nanmean(dim=1, keepdim=True)
    return (rewards - mean) / mean.clamp(min=1e-6)

def too_few(*tensors):
    return tensors[0].sum()

def broken(*tensors):
    raise KeyError("x")
"""


@pytest.fixture(autouse=True)
def extra(tmp_path, monkeypatch):
    (tmp_path / "own_math.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_reference_may_be_refreshed_after_any_number_of_whole_rollouts(tmp_path):
    settings = {"beta": 0.1, "steps_per_generation": 8, "gradient_accumulation_steps": 2}
    config(MathGRPOConfig, tmp_path, reference_refresh_steps=8, **settings)  # 2 rollouts of 4 optimizer steps


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"activation_offloading": True, "gradient_checkpointing": True}, "activation_offloading=True has no GPU here"),
        ({"bf16": False, "fp16": True}, "fp16=True is computed on GPUs alone"),
        # A rollout of 2 training steps used twice, and one of 8 of which an optimizer step has 2.
        (
            {"beta": 0.1, "reference_refresh_steps": 3, "num_iterations": 2, "gradient_accumulation_steps": 2},
            r"reference_refresh_steps=3 falls .* serves 2 optimizer steps .*num_iterations=2, steps_per_generation=2",
        ),
        (
            {"beta": 0.1, "reference_refresh_steps": 6, "steps_per_generation": 8, "gradient_accumulation_steps": 2},
            r"reference_refresh_steps=6 falls .* serves 4 optimizer steps .*: use a multiple of 4",
        ),
        ({"baseline": "own_math:max_rI"}, r"names no function of own_math: use one of its functions: max_rl"),
        ({"baseline": "no_such_module:f"}, r"names a module that cannot be imported \(ModuleNotFoundError"),
        ({"baseline": "own_math:too_few"}, r"returned a tensor of shape \(\): return a tensor of shape \(2, 8\)"),
        ({"baseline": "own_math:broken"}, r"baseline='own_math:broken' raised KeyError"),
        ({"surrogate": "own_math:too_few"}, r"returned a tensor of shape \(\): return a tensor of shape \(2, 3\)"),
        ({"surrogate": "small_trainers:clip", "loss_type": "cispo"}, "loss_type='cispo' is TRL's name of a surrogate"),
    ],
)
def test_what_cannot_work_is_refused_before_weights_load(settings, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        config(MathGRPOConfig, tmp_path, **{"num_generations": 8, **settings})


def test_fsdp_through_accelerate_refreshes_no_reference(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match="fsdp"):
        config(MathGRPOConfig, tmp_path, beta=0.1, reference_refresh_steps=2)


def test_a_recipe_becomes_the_settings_of_a_run_and_what_a_class_refuses_is_one_line(tmp_path):
    words = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false", "--max_steps", "7"]
    settings = build_settings(read([*words, "--lora_r", "3"]))
    assert (settings.config.max_steps, settings.model.lora_r, settings.recipe.argv[:1]) == (7, 3, ["--output_dir"])
    assert settings.recipe.settings.explicit == {"output_dir", "use_cpu", "bf16", "max_steps", "lora_r"}
    for field, value, message in (("optim", "sdg", "sdg"), ("tf32", "true", r"tf32=True is refused \(--tf32 requires")):
        with pytest.raises(UserError, match=message):
            build_settings(read([*words, f"--{field}", value]))


@pytest.mark.parametrize("parser", [HfArgumentParser, TrlParser])
def test_the_parsers_of_transformers_and_trl_take_the_class_and_a_subclass_with_its_own_metadata(parser, tmp_path):
    words = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false"]
    own = HfArg(default="nsr", help="Own.", aliases="-o", metadata={"choices": ["none", "nsr"]})
    mine = make_dataclass("Mine", [("baseline", str, own)], bases=(MathGRPOConfig,))
    for kind, more, value in ((MathGRPOConfig, ["--dppo_low", "0.5"], "group_mean"), (mine, ["-o", "none"], "none")):
        _, args, _ = parser((ScriptArguments, kind, ModelConfig)).parse_args_into_dataclasses(words + more)
        assert (type(args), args.baseline, args.dppo_low) == (kind, value, 0.2 if kind is mine else 0.5)


@pytest.mark.parametrize(
    ("more", "seconds"),
    [([], 4096), (["--ddp_timeout", "60"], 60), (["--use_peft", "true"], 1800), (["--vllm_mode", "colocate"], 1800)],
)
def test_the_other_processes_wait_as_long_as_a_server_may_sample_for_full_weights(more, seconds, tmp_path):
    words = {"use_cpu": "true", "bf16": "false", "use_vllm": "true", "vllm_mode": "server", "num_generations": "8"}
    words |= {"prompts_per_step": "16", "per_device_train_batch_size": "8", "max_completion_length": "16000"}
    options = [word for name, value in words.items() for word in (f"--{name}", value)]
    settings = build_settings(read([*options, "--output_dir", str(tmp_path), *more]))
    assert settings.config.ddp_timeout == settings.run.ddp_timeout == seconds


@pytest.mark.parametrize("base", [GRPOConfig, MathGRPOConfig])
def test_a_field_of_a_subclass_may_have_a_name_of_a_recipe(base, small, chars, tmp_path):
    others = [name for name in fields() if name not in MathGRPOConfig.__dataclass_fields__]
    others += ["k", "baseline", "staleness"] if base is GRPOConfig else []
    mine = make_dataclass("Mine", [(name, str, "own") for name in others], bases=(base,))
    trainer = make(MathGRPOTrainer, mine, small, chars, tmp_path, max_steps=1)
    trainer.train()
    assert {getattr(trainer.args, name) for name in others} == {"own"}
    settings = trainer.grpo_math.settings
    assert (settings.k, settings.baseline, settings.staleness) == (4, "group_mean", 0)
    assert "own" not in read_run(tmp_path).config.values()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_what_a_script_is_refused_of_trls_fields_trl_cannot_train_with(trainer_in, tmp_path):
    """Each refused value, alone. The first value of a field that TRL trains with fails this test."""
    values = {"int": (0, -1, 1, 3), "float": (0, -1, -0.5, 0.5, 3.0), "str": ("foo",)}
    tried, trained = 0, []
    limited = {name for name, facts in TRL_FACTS.items() if facts.keys() & {"gt", "ge", "lt", "le", "choices"}}
    for name in limited & GRPOConfig.__dataclass_fields__.keys():
        for value in {value for kind in fields()[name].kinds for value in values.get(kind, ())}:
            try:
                config(MathGRPOConfig, tmp_path, **{name: value})
            except (ConfigError, ValueError):
                tried += 1
                settings = {"max_steps": 2, "optim": "adamw_torch", name: value}
                with suppress(Exception):
                    trainer = trainer_in(tmp_path, **KINDS["trl"], **settings)
                    trainer.train()
                    trained += [(name, value)] if trainer.state.global_step else []
    assert tried > 40
    assert trained == []

"""``adapter``: where it is, what its configuration says, and what a resumed run compares."""

import json

import pytest

from grpo_math.run.resume import changed, explicit_settings
from grpo_math.settings.recipe import read

CONFIG = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "lora_dropout": 0.1, "target_modules": ["v_proj", "q_proj"]}


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(name="sft", **config):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
        (tmp_path / name / "adapter_model.safetensors").write_bytes(b"weights")

    return write


def of(**settings):
    return read([f"--{name}={value}" for name, value in {"adapter": "sft", **settings}.items()])


@pytest.mark.parametrize(
    ("config", "settings", "expected"),
    [
        ({}, {}, {"lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.1, "lora_target_modules": ["q_proj", "v_proj"]}),
        ({"use_rslora": True, "r": 600}, {"lora_r": 600, "lora_dropout": 0}, {"use_rslora": True, "lora_dropout": 0}),
        ({"target_modules": ["q_proj"]}, {}, {"lora_target_modules": [r"(.*\.)?q_proj"]}),
        ({"target_modules": ".*q"}, {"lora_target_modules": "all-linear"}, {"lora_target_modules": [".*q"]}),
        ({"modules_to_save": ["lm_head"]}, {}, {"lora_modules_to_save": ["lm_head"]}),
    ],
)
def test_its_configuration_makes_the_settings(config, settings, expected, write):
    write(**config)
    recipe = of(**settings)
    assert recipe.problems == []
    expected = {"use_peft": True, **expected}
    assert {name: getattr(recipe.settings, name) for name in expected} == expected
    line = "lora_target_modules all-linear -> .*q, by the adapter"
    assert recipe.replaced == [line] * ("lora_target_modules" in settings)


@pytest.mark.parametrize(
    ("config", "settings", "line"),
    [
        (
            {},
            {"lora_r": 4, "lora_alpha": 16, "use_dora": "true", "lora_modules_to_save": "lm_head"},
            "adapter='sft' has lora_r: 8, use_dora: None, lora_modules_to_save: None in its configuration: leave out "
            "lora_r, use_dora, lora_modules_to_save",
        ),
        ({}, {"use_peft": "false"}, "adapter='sft' has use_peft: True in its configuration: leave out use_peft"),
        ({"use_dora": True}, {}, "adapter='sft' is of the kind DORA: give a LoRA, or merge it into its base"),
        ({"peft_type": "LOHA"}, {}, "adapter='sft' is of the kind LOHA: give a LoRA, or merge it into its base"),
        ({"target_modules": 5}, {}, "sft/adapter_config.json cannot be read (TypeError: object of type 'int' has no"),
        ({}, {"adapter": "."}, "adapter='.' has no adapter_config.json: give one of sft"),
        ({}, {"adapter": "sft/none"}, "adapter='sft/none' is not a folder: give the folder of a LoRA adapter, or"),
        ({}, {"adapter": "ada/none"}, "adapter='ada/none' is neither a folder here nor on the Hub (OfflineModeIsEn"),
    ],
)
def test_what_cannot_be_trained_further_is_one_line(config, settings, line, write):
    write(**config)
    [problem] = of(**settings).problems
    assert str(problem).startswith(line)


def test_a_run_resumes_with_an_adapter_of_the_same_content_wherever_it_is(write):
    for name, alpha in (("sft", 16), ("copied/sft", 16), ("other", 32)):
        write(name, lora_alpha=alpha)
    config = {"stated": explicit_settings(of().settings)}
    assert changed(config, of(adapter="copied/sft").settings) == []
    of_run, now = (explicit_settings(of(adapter=name).settings)["adapter"] for name in ("sft", "other"))
    expected = [f"adapter: {of_run} -> {now}", "lora_alpha: 16 -> 32"]
    assert changed(config, of(adapter="other").settings) == expected

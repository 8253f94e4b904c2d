"""Recipes for `trl grpo` and open-r1, and fields that TRL has dropped."""

import ast
import inspect
from pathlib import Path

import pytest
import yaml
from small_runs import history

from grpo_math import cli
from grpo_math.errors import UserError
from grpo_math.run import resume
from grpo_math.settings import translate
from grpo_math.settings.fields import fields
from grpo_math.settings.recipe import read
from grpo_math.settings.run_settings import RunSettings

OPEN_R1 = {
    "model_name_or_path": "embedded",
    "torch_dtype": "float32",
    "dataset_name": "mine.jsonl",
    "columns": "problem=query",
    "system_prompt": "Think:\n<think>\n...\n</think>\n<answer>\n...\n</answer>",
    "do_eval": True,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "hub_model_id": "me/mine",
    "push_to_hub": False,
    "max_prompt_length": 512,
    "num_generations": 4,
    "overwrite_output_dir": True,
    "per_device_eval_batch_size": 4,
    "per_device_train_batch_size": 4,
    "reward_funcs": ["accuracy", "format", "tag_count"],
    "reward_weights": [1.0, 0.5, 0.5],
    "warmup_ratio": 0.1,
    "max_completion_length": 16,
    "max_steps": 1,
    "use_cpu": True,
    "bf16": False,
    "report_to": ["none"],
    "save_strategy": "no",
    "output_dir": "run",
}

OURS = {
    "dataset": "mine.jsonl",
    "columns": "problem=query",
    "rewards": ["accuracy", "format_strict", "xml_count"],
    "dtype": "float32",
    "warmup_steps": 0.1,
    "prompt_template": "{problem}",
    "eval_strategy": "steps",
    "eval_steps": 1,
}


def recipe(folder, **output) -> str:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(output))
    return str(path)


def test_a_recipe_of_trls_fields_and_open_r1s_rewards_becomes_our_fields(tmp_path):
    results = read(["--config", recipe(tmp_path, **OPEN_R1)]).raise_first_problem()
    assert {**results.settings.explicit_values(), **OURS} == results.settings.explicit_values()
    assert sorted(note.split()[0].partition("=")[0] for note in results.notes) == [  # one line each
        *("do_eval", "max_prompt_length", "overwrite_output_dir", "per_device_eval_batch_size"),
        *("torch_dtype", "warmup_ratio"),
    ]


@pytest.mark.full
def test_an_open_r1_recipe_trains(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = '{"query": "What is %d + 4?", "solution": "$\\\\boxed{%d}$"}'
    Path("mine.jsonl").write_text("".join(row % (n, n + 4) + "\n" for n in range(8)))
    assert cli.main(["train", "--config", recipe(tmp_path, **{**OPEN_R1, "model_name_or_path": tiny()})]) == 0
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    assert (config["answer_format"], config["rewards"]) == ("think", OURS["rewards"])
    (evaluated,) = [line for line in history(Path("run")) if "eval_mine.jsonl_accuracy" in line]
    assert (evaluated["step"], evaluated["eval_mine.jsonl_n"]) == (1, 8)


def test_a_recipe_for_trl_grpo_keeps_the_prompts_of_its_data(tmp_path):
    output = {"dataset_name": "chats.jsonl", "reward_funcs": ["accuracy_reward", "my_rewards.deep.short"]}
    results = read(["--config", recipe(tmp_path, **output, dataset_test_split="dev")]).raise_first_problem()
    assert results.settings.explicit_values()["rewards"] == ["accuracy", "my_rewards.deep:short"]
    assert (results.settings.prompt_template, results.settings.eval_split) == ("as_is", "dev")
    assert results.notes == []


@pytest.mark.parametrize("off", ["false", "no", "off", "none", "[]"])
def test_a_field_without_effect_that_is_switched_off_needs_no_line(off, tmp_path):
    assert read(["--group_by_length", off, "--config", recipe(tmp_path, do_eval=yaml.safe_load(off))]).notes == []


def test_a_field_of_an_earlier_version_that_was_off_changed_nothing(tmp_path):
    assert read(["--config", recipe(tmp_path, reference_in_4bit=False)]).raise_first_problem().notes == []
    assert resume.changed({"stated": {"reference_in_4bit": False}}, RunSettings({})) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("stop_at", 0.9), ("reference_dtype", "bfloat16"), ("reference_in_4bit", True), ("geometric_mask_weight", "one")],
)
def test_a_recipe_and_a_run_of_0_3_name_a_field_that_went(name, value, tmp_path):
    found = read(["--config", recipe(tmp_path, **{name: value})]).raise_first_problem()
    (note,) = found.notes
    assert note.startswith(f"{name}={value} has no effect: of grpo_math 0.3: ")
    assert resume.changed({"stated": {**found.settings.explicit_values(), name: value}}, found.settings) == [
        f"{name}: {value} -> None"
    ]


def test_a_field_of_open_r1_that_is_not_here_is_named_so(tmp_path):
    fields = {"chat_template": "{{ x }}", "cosine_max_len": 1000, "soft_punish_cache": 8, "code_language": "python"}
    notes = read(["--config", recipe(tmp_path, **fields, num_processes=8)]).raise_first_problem().notes
    assert sorted(note.partition(" ")[0].partition("=")[0] for note in notes) == sorted([*fields, "num_processes"])
    assert sum(" has no effect: of open-r1, not here: " in note for note in notes) == len(fields)
    # A number in YAML, as a configuration may be named by its year.
    assert translate.for_script({"dataset": "a/b", "dataset_config": 2024})["dataset"] == "a/b:2024"


def test_the_command_line_wins_by_either_name_and_a_configuration_joins_the_name():
    given = ["--dataset_name", "openai/gsm8k", "--dataset_config", "main", "--reward_funcs", "accuracy", "format"]
    results = read(given).raise_first_problem().settings.explicit_values()
    assert (results["dataset"], results["rewards"]) == ("openai/gsm8k:main", ["accuracy", "format_strict"])


@pytest.mark.parametrize(("old", "field"), translate.TRANSLATIONS.items())
def test_two_names_of_one_setting_with_different_values_are_refused(old, field, tmp_path):
    for one, other in ((old, field), (field, old)):
        with pytest.raises(UserError, match=f"^{old} and {field} are two names of one setting"):
            read(["--config", recipe(tmp_path, **{one: "2", other: "1"})])
        with pytest.raises(UserError, match=f"^{old} and {field} are two names of one setting"):
            read([f"--{one}", "2", f"--{other}", "1"])
    # As in recipes that run with older versions, too.
    translate.translated({old: "true", field: True})


@pytest.mark.parametrize(
    ("recipe", "fields"),
    [
        ({"warmup_ratio": 0.1, "warmup_steps": 0}, {"warmup_steps": 0.1}),
        ({"torch_dtype": "bfloat16", "dtype": None}, {"dtype": "bfloat16"}),
        ({"evaluation_strategy": "no", "eval_strategy": False}, {"eval_strategy": False}),
        ({"reward_funcs": "accuracy", "rewards": ["accuracy"]}, {"rewards": ["accuracy"]}),
    ],
)
def test_two_names_of_one_setting_that_say_the_same_or_of_which_one_is_off_are_one(recipe, fields):
    assert translate.translated(recipe)[0] == fields
    assert translate.translated(dict(reversed(recipe.items())))[0] == fields


@pytest.mark.parametrize(
    ("words", "written", "template", "note"),
    [
        (["--dataset_name", "gsm8k"], {}, "as_is", "--dataset_name sets prompt_template to 'as_is', as in TRL"),
        (["--dataset_name", "math"], {"dataset": "gsm8k"}, "as_is", "--dataset_name sets prompt_template to 'as_is'"),
        (["--dataset_name", "gsm8k", "--prompt_template", "boxed"], {}, "boxed", None),
        (["--dataset_name", "math"], {"dataset_name": "gsm8k"}, "as_is", None),
        (["--dataset", "math"], {"dataset": "gsm8k"}, None, None),
    ],
)
def test_a_name_of_a_script_that_changes_the_prompt_says_so(words, written, template, note, tmp_path):
    results = read([*words, "--config", recipe(tmp_path, seed=1, **written)]).raise_first_problem()
    assert results.settings.prompt_template == template
    assert [line[: len(note or "")] for line in results.notes] == [note] * (note is not None)


def test_every_translation_ends_at_a_field_of_ours_and_begins_at_none():
    ours = {*fields(), *translate.SCRIPTS}
    assert {*translate.TRANSLATIONS.values(), *translate.SYNONYMS.values()} <= ours
    assert len({*translate.TRANSLATIONS.values()}) == len(translate.TRANSLATIONS), "each field has one old name"
    assert not translate.SAME.keys() & fields().keys()
    from grpo_math.rewards import load_reward

    assert all(callable(load_reward(name)) for name in translate.REWARDS.values())


@pytest.mark.slow
def test_every_field_and_reward_of_trl_grpo_is_known():
    from trl.scripts import grpo
    from trl.scripts.grpo import GRPOScriptArguments

    known = {*fields(), *translate.SAME, *translate.SCRIPTS, *translate.NO_EFFECT, *translate.SYNONYMS}
    assert set(GRPOScriptArguments.__dataclass_fields__) <= known
    registry = next(
        node.value
        for node in ast.walk(ast.parse(inspect.getsource(grpo)))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "reward_funcs_registry"
    )
    assert {ast.literal_eval(key) for key in registry.keys} <= translate.REWARDS.keys()

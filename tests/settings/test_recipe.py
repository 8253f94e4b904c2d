"""A recipe is read without torch as training reads it: names, defaults, kinds, choices, ranges."""

import math
import os
import re
import subprocess
import sys
from dataclasses import MISSING, fields

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_math import cli
from grpo_math.errors import UserError
from grpo_math.settings import fields as settings_fields
from grpo_math.settings.recipe import METHODS, check, read, read_and_set_env, read_recipe
from grpo_math.settings.rules import violations


@pytest.mark.parametrize("name", METHODS)
def test_a_method_sets_fields_that_go_together_and_that_the_command_line_may_change(name):
    needed = {
        "on_policy_distillation": ["--reference_model", "a"],
        "gdpo": ["--rewards", "accuracy", "overlong"],
        "icepop": ["--use_vllm"],
    }
    teacher = needed.get(name, [])
    recipe = read(["--method", name, "--output_dir", "run", *teacher])
    fields = METHODS[name]["fields"]
    assert recipe.problems == []
    assert recipe.notes == (
        ["--method distill_and_reward distils the model before its training: name a teacher as reference_model"]
        if name == "distill_and_reward"
        else []
    )
    assert {field: getattr(recipe.settings, field) for field in fields} == fields
    assert recipe.settings.explicit - {"reference_model", "use_vllm", *({"rewards"} - {*fields})} == {
        *fields,
        "output_dir",
    }
    assert not [str(line) for _, line in violations(recipe.settings) if line.field in fields]
    other = read(["--method", name, "--loss_type", "bnpo", "--output_dir", "run", *teacher])
    assert other.settings.loss_type == "bnpo"


def test_a_method_wins_over_a_recipe_and_the_command_line_over_a_method(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "epsilon_high: 0.5\nloss_type: dapo\nbeta: 0.0\nrewards: [gsm8k, overlong]\nreward_weights: [1, 2]"
    )
    words = ["--config", str(recipe), "--method"]
    dapo = read([*words, "dapo"])
    assert (dapo.settings.epsilon_high, dapo.settings.reward_weights) == (0.28, [1.0, 0.5])
    assert dapo.notes == []
    assert dapo.replaced == [
        "reward_weights [1, 2] is dropped with its rewards, by --method dapo",
        "epsilon_high 0.5 -> 0.28, by --method dapo",
        "rewards ['gsm8k', 'overlong'] -> ['accuracy', 'overlong'], by --method dapo",
    ]
    typed = read([*words, "dapo", "--epsilon_high", "0.3", "--resample_groups", "3", "--rewards", "accuracy"])
    assert (typed.settings.epsilon_high, typed.settings.rewards, typed.settings.reward_weights) == (
        0.3,
        ["accuracy"],
        None,
    )
    # Equal values need no line, though the command line has texts.
    assert typed.notes == [
        "epsilon_high='0.3' stays, and --method dapo has 0.28: set the one you want",
        "rewards=['accuracy'] stays, and --method dapo has ['accuracy', 'overlong']: set the one you want",
    ]
    assert typed.replaced == [
        "reward_weights [1, 2] is dropped with its rewards, by --method dapo",
        "reward_weights [1.0, 0.5] is dropped with its rewards, by the command line",
    ]
    teacher = read([*words, "on_policy_distillation", "--beta", "1.0"])
    assert (teacher.settings.rewards, teacher.settings.reward_weights, teacher.notes) == ([], None, [])


@pytest.mark.slow
def test_the_fields_and_their_defaults_are_those_of_the_real_classes():
    from grpo_math.trainer.recipe_settings import CLASSES

    defaults = {
        field.name: field.default_factory() if field.default is MISSING else field.default
        for kind in CLASSES
        for field in fields(kind)
    }
    defaults = {name: getattr(value, "value", value) for name, value in defaults.items()} | settings_fields.OURS
    assert {name: field.default for name, field in settings_fields.fields().items()} == defaults


def test_every_range_is_of_a_field_and_every_default_is_taken():
    assert settings_fields.TRL_FACTS.keys() | settings_fields.OUR_FACTS.keys() <= settings_fields.fields().keys()
    for field in settings_fields.fields().values():
        for value in field.default if isinstance(field.default, list) else [field.default]:
            field.refuse(value, value)


@pytest.mark.parametrize(
    ("name", "value", "result"),
    [
        ("max_steps", "7", 7),
        ("learning_rate", "1e-5", 1e-5),
        ("learning_rate", 1, 1.0),
        ("use_peft", "no", False),
        ("use_peft", 1, True),
        ("bf16", None, None),
        ("rewards", "accuracy", ["accuracy"]),
        ("rewards", ["accuracy", "overlong"], ["accuracy", "overlong"]),
        ("reward_weights", ["0.1", "0.9"], [0.1, 0.9]),
        ("report_to", "none", "none"),
        ("report_to", ["wandb"], ["wandb"]),
        ("model_init_kwargs", '{"dtype": "float32"}', {"dtype": "float32"}),
        ("heldout", ["[{data: math500, n: 9}]"], [{"data": "math500", "n": 9}]),
        ("heldout", ['{"data": "a"}', "{data: b}"], [{"data": "a"}, {"data": "b"}]),
        ("resume_from_checkpoint", True, True),
        ("scale_rewards", False, False),
        ("output_dir", 5, "5"),
        ("vllm_max_model_length", None, None),
        ("save_steps", 0.25, 0.25),
        ("learning_rate", "5e-6", 5e-6),  # as YAML reads it, without a point
        ("num_generations", "8", 8),
        ("max_steps", 20.0, 20),
        ("deepspeed", "zero2.json", "zero2.json"),
        ("fsdp_config", '{"min_num_params": 1}', {"min_num_params": 1}),
        ("vllm_server_base_url", "http://h:1", "http://h:1"),
        ("pad_to_multiple_of", "8", 8),
        ("pad_to_multiple_of", "auto", "auto"),
    ],
)
def test_a_value_is_taken_as_training_takes_it(name, value, result):
    assert check(name, value) == result
    assert type(check(name, value)) is type(result)


def test_a_system_prompt_may_be_a_file(tmp_path):
    (tmp_path / "system.txt").write_text("Think first.\nThen answer after ####.\n")
    assert check("system_prompt", f"{tmp_path}/system.txt") == "Think first.\nThen answer after ####."
    with pytest.raises(UserError, match=r"sytem\.txt cannot be read \(No such file"):
        check("system_prompt", f"{tmp_path}/sytem.txt")


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--learning-rate", "1e-5"], {"learning_rate": 1e-5}),
        (["--max_steps=-1"], {"max_steps": -1}),
        (["--max_steps", "-1"], {"max_steps": -1}),
        (["--use_peft"], {"use_peft": True}),
        (["--rewards", "accuracy", "overlong", "--seed", "3"], {"rewards": ["accuracy", "overlong"], "seed": 3}),
        (["--lora_target_modules", "all-linear"], {"lora_target_modules": ["all-linear"]}),
        (["--rewards", "[]"], {"rewards": []}),
    ],
)
def test_words_of_the_command_line_are_read_as_argparse_reads_them(words, values):
    assert read(words).raise_first_problem().settings.explicit_values() == values


def test_variables_are_written_as_a_shell_would_have_them(tmp_path, monkeypatch):
    variables = {
        "A": ("true", "true"),
        "B": ("no", "false"),
        "C": ('""', ""),
        "D": ("1", "1"),
        "E": ("yes, sir", "yes, sir"),
        "CUDA_VISIBLE_DEVICES": ('"0,1"', "before"),  # of the launcher, which has other GPUs for the server
    }
    for name in variables:
        monkeypatch.setenv(name, "before")
    (tmp_path / "recipe.yaml").write_text(
        "env:\n" + "".join(f"  {name}: {text}\n" for name, (text, _) in variables.items())
    )
    words = ["--config", str(tmp_path / "recipe.yaml")]
    assert read(words).env == {name: value for name, (_, value) in variables.items() if name != "CUDA_VISIBLE_DEVICES"}
    assert {os.environ[name] for name in variables} == {"before"}, "a library call changes nothing in its process"
    read_and_set_env(words)
    assert {name: os.environ[name] for name in variables} == {name: value for name, (_, value) in variables.items()}


# Ctrl-C at the first import of a package that reads variables.
INTERRUPTED = """
import os, runpy, signal, sys

class Interrupting:
    def find_spec(self, name, *_):
        if name in ("accelerate", "huggingface_hub", "torch"):
            print(os.environ["HF_HOME"], flush=True)
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
sys.argv[1:] = ["--config", "recipe.yaml"]
runpy.run_module("grpo_math.train", run_name="__main__")
"""


@pytest.mark.slow
def test_training_sets_the_variables_of_a_recipe_and_handles_signals_before_it_imports_packages(tmp_path):
    (tmp_path / "recipe.yaml").write_text("env: {HF_HOME: 5}\n")
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "5\n", "")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("beta", "inf", "beta='inf' is not finite: give a finite number"),
        ("beta", None, "beta=None is empty: give a value, or leave it out for 0.0"),
        ("max_steps", 2.5, "max_steps=2.5 is not a whole number: give a whole number"),
        ("max_steps", True, "max_steps=True is not a whole number: give a whole number"),
        ("learning_rate", [1e-5], "learning_rate=[1e-05] is not a number: give a number"),
        ("use_peft", "maybe", "use_peft='maybe' is not true or false: give true or false"),
        ("loss_type", {"a": 1}, "loss_type={'a': 1} is not a text: give a text"),
        ("generation_kwargs", "fast", "generation_kwargs='fast' is not a mapping: write it as {\"name\": 1}"),
        ("model_init_kwargs", '{"token": ', "model_init_kwargs='***' is not a mapping: write it as {\"name\": 1}"),
        (
            "rewards",
            [{"accuracy": 1.0}],
            "rewards=[{'accuracy': 1.0}] is not a list: write rewards: [accuracy] and reward_weights: [1.0]",
        ),
        ("report_to", {"wandb": "x"}, "report_to={'wandb': 'x'} is not a list: write report_to: [wandb]"),
        ("lora_target_modules", [None], "lora_target_modules=None is empty: give a value, or leave it out for []"),
        ("heldout", "[{data: a", "heldout='[{data: a' is not a mapping: write it as {\"name\": 1}"),
        ("reward_weights", ["low"], "reward_weights='low' is not a number: give a number"),
        ("max_completion_length", None, "max_completion_length=None is empty: give a value, or leave it out for 512"),
    ],
)
def test_a_value_of_another_kind_is_refused_in_one_line(name, value, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        check(name, value)


def test_an_integer_that_no_float_holds_is_refused():
    with pytest.raises(UserError, match="is not finite: give a finite number"):
        check("max_steps", 10**400)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--learning_rate"], "--learning_rate needs a value"),
        (["--seed", "1", "2"], "--seed takes one value, not 1 2"),
        (["stray", "--seed", "1"], "stray is not a setting"),
        (
            ["--max-response-length", "5"],
            "--max_response_length is not a setting: did you mean --max_completion_length?",
        ),
        # Compared with meaning first
        (["--torch_dtyp", "1"], "--torch_dtyp is not a setting: did you mean --dtype?"),
        (["--confg", "1"], "--confg is not a setting: did you mean --config?"),
        (["--template", "1"], "--template is not a setting: did you mean --prompt_template?"),
        (["--max_new_token", "1"], "--max_new_token is not a setting: did you mean --max_completion_length?"),
        (["--reward_func", "1"], "--reward_func is not a setting: did you mean --rewards?"),
        (["--temprature", "1"], "--temprature is not a setting: did you mean --temperature?"),
        *(
            ([f"--{name}", "1"], f"--{name} is not a setting: did you mean --{field}?")
            for name, field in {
                "dataset_prompt_column": "columns",
                "dataset_configs": "dataset",
                "wandb_project": "project",
                "hub_model_revision": "hub_revision",
            }.items()
        ),
        (["--dataset_mixture", "1"], "dataset_mixture='1' is of open-r1, not here: name one set in dataset"),
        (["--reward_funcs", "cosine"], "rewards='cosine' is of open-r1, not here: leave it out, or name your own as"),
        (["--language", "1"], "--language is not a setting: grpo-math train --help-all lists them"),
    ],
)
def test_words_that_make_no_sense_are_a_problem(words, message):
    (problem,) = read(words).problems
    assert message in str(problem)


@pytest.mark.parametrize("option", sorted({"config", *cli._options(cli.command_parser("train"))} - {"help"}))
def test_an_option_of_train_in_a_recipe_or_of_another_program_is_named_so(option, tmp_path):
    (tmp_path / "recipe.yaml").write_text(f"{option}: 2")
    argv = ["--config", str(tmp_path / "recipe.yaml")]
    message = f"{option} is not a setting: give it to grpo-math train on the command line"
    assert [str(problem) for problem in read(argv).problems] == [f"{message} ({argv[1]}, line 1)"]
    if option not in ("config", "method"):
        assert [str(problem) for problem in read([f"--{option}", "2"]).problems] == [f"--{message}"]


def test_a_mistake_in_a_recipe_is_named_with_its_line_and_one_on_the_command_line_is_not(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("# a recipe\nlearning_rat: 1e-5\n\nloss_type: drgpo\nseed: many\n")
    problems = [str(problem) for problem in read(["--config", str(path), "--seed", "x"]).problems]
    assert problems[0] == f"learning_rat is not a setting: did you mean learning_rate? ({path}, line 2)"
    assert problems[1].startswith("loss_type='drgpo' is not known: did you mean 'dr_grpo'?")
    assert problems[1].endswith(f" ({path}, line 4)")
    assert problems[2] == "seed='x' is not a whole number: give a whole number"


@pytest.mark.parametrize("argv", [["--config"], ["--config", "--seed"]])
def test_a_recipe_that_is_not_named_is_refused(argv):
    with pytest.raises(UserError, match="--config"):
        read(argv)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nseed: 2\n", "seed is given twice, in line 2"),
        ("seed: @1\n", "cannot start any token"),
        ("seed:\t1\n\tbeta: 2\n", "cannot be read (ScannerError: while scanning"),
        ("a: [1, 2\n", "cannot be read (ParserError: while parsing a flow sequence"),
        ("- seed\n", "contains no fields"),
        ("", "contains no fields"),
        ("a: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        ("env: [A]\n", "env is not a mapping"),
        *(
            (f"env: {{{text}}}\n", "the name or the value is not a text: put it in quotes")
            for text in ("CUDA_VISIBLE_DEVICES: ", "A: [1]", "A: {B: 1}", "on: 1", "A: 2026-11-29")
        ),
    ],
)
def test_a_file_that_is_not_a_recipe_is_refused_in_one_line(text, message, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    # The dots match no line end.
    with pytest.raises(UserError, match=rf"^{re.escape(str(path))}.*{re.escape(message)}.*\Z"):
        read_recipe(path)


@pytest.mark.slow
@given(
    st.sampled_from(sorted(settings_fields.fields())),
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.lists(st.text())
    | st.dictionaries(st.text(), st.integers()),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
def test_whatever_a_recipe_holds_is_refused_in_words_or_taken_and_the_same_when_written_and_read(
    tmp_path_factory, name, value
):
    try:
        taken, output = check(name, value), name
    except UserError as error:
        taken, output = None, str(error)
    assert name in output
    assert not isinstance(taken, float) or math.isfinite(taken)
    if taken is not None:
        path = tmp_path_factory.getbasetemp() / "recipe.yaml"
        path.write_text(yaml.safe_dump({name: taken}), encoding="utf-8")
        assert check(name, read_recipe(path)[name]) == taken

"""The checks before a run, each on what it is for: a machine, a tokenizer or a server that is not this one."""

from __future__ import annotations

import json
import sys
from collections import namedtuple

import pytest
from small_http import AnsweringHTTP

from grpo_math.checks import machine
from grpo_math.checks.preflight import preflight
from grpo_math.checks.setup import Setup
from grpo_math.settings.recipe import read
from grpo_math.tools import sandbox

ARGV = ["--model_name_or_path", "embedded", "--dataset", "generated:sums", "--use_cpu", "--output_dir", "run"]


def setup(*words: str, **more) -> Setup:
    results = read([*ARGV, *words])
    assert results.problems == []
    return Setup(results.values, results.given, **more)


def results(check: str, *words: str, **more) -> list[tuple[str, str]]:
    findings = preflight(setup(*words, **more), only=(check,))
    return [(finding.level, f"{finding.message}: {finding.remedy}") for finding in findings]


# The machine


@pytest.mark.skipif(sys.platform != "linux", reason="the Python tool needs Linux")
def test_a_kernel_that_cannot_sandbox_the_python_tool_ends_the_run(monkeypatch):
    words = ["--tools", "python", "--prompt_template", "python"]
    assert results("python_tool") == results("python_tool", *words) == []
    monkeypatch.setattr(sandbox, "layers", lambda: {"landlock": 0, "seccomp": 0})
    [(level, message)] = results("python_tool", *words)
    assert level == "error"
    assert "a program could open connections" in message


def test_a_version_outside_the_range_of_pyproject_is_an_error(monkeypatch):
    assert results("versions") == []
    old = {"trl": "1.17.0", "bitsandbytes": "0.1"}
    monkeypatch.setattr(machine.metadata, "version", lambda name: old.get(name, "999"))
    trl = 'trl 1.17.0 is not a version that this works with (<1.17,>=1.16): pip install "trl<1.17,>=1.16"'
    assert [text for _, text in results("versions")] == [trl]
    [_, (level, text)] = results("versions", "--load_in_4bit")
    assert (level, text.partition(" is not")[0]) == ("error", "bitsandbytes 0.1")


@pytest.mark.parametrize(
    ("gpus", "words", "levels"),
    [
        ((7.5,), ["--bf16", "true"], ["error"]),
        ((7.5,), ["--dtype", "bfloat16"], ["error"]),
        ((9.0, 7.0), ["--dtype", "bfloat16"], ["error"]),
        ((), [], ["info"]),
        ((8.0,), ["--bf16", "true"], []),
        ((8.0,), ["--dtype", "bfloat16"], ["warning"]),  # weights without a float32 copy
        ((8.0,), ["--dtype", "auto"], []),
        ((8.0,), ["--dtype", "bfloat16", "--use_peft"], []),
        ((8.0,), ["--dtype", "bfloat16", "--deepspeed", "deepspeed/zero2.json"], []),
    ],
)
def test_bfloat16_needs_a_gpu_that_has_it_and_a_float32_copy_of_the_weights(gpus, words, levels, monkeypatch):
    monkeypatch.setattr(machine, "capabilities", lambda: gpus)
    assert [level for level, _ in results("number_format", "--use_cpu", "false", *words)] == levels
    if levels == ["warning"]:
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        assert not results("number_format", "--use_cpu", "false", *words)


def usage(free):
    return lambda folder: namedtuple("usage", "total used free")(0, 0, free)


def test_a_checkpoint_and_the_weights_are_held_against_the_disk(monkeypatch):
    """q_proj and v_proj of SmolLM2: 30 layers x rank 16 x (576 + 576 + 576 + 192) = 921,600 parameters.

    A checkpoint has float32 weights and Adam's two moments, and the final weights come to a third of that.
    """
    for free, levels in ((921_600 * 16.2, []), (921_600 * 15.9, ["error"])):
        monkeypatch.setattr(machine.shutil, "disk_usage", usage(free))
        assert [level for level, _ in results("disk", "--use_peft")] == levels


@pytest.mark.parametrize(
    ("check", "words", "levels"),
    [
        ("batch", ["--per_device_train_batch_size", "8", "--num_generations", "8"], ["info", "warning"]),  # one prompt
        ("batch", ["--per_device_train_batch_size", "8", "--num_generations", "4"], ["info"]),
        ("deepspeed", [], []),
        ("deepspeed", ["--fsdp", "full_shard"], ["error"]),  # without a launcher
        ("number_format", ["--attn_implementation", "flash"], ["error"]),
        ("adapter", ["--model_name_or_path", "PHI", "--use_peft"], ["info"]),  # which is not measured
        ("disk", ["--model_name_or_path", "PHI", "--use_peft"], ["info"]),
    ],
)
def test_a_check_of_the_settings_alone(check, words, levels, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi3"}))
    assert [level for level, _ in results(check, *(word.replace("PHI", str(tmp_path)) for word in words))] == levels


# Problems and rewards


def test_contradictory_gold_answers_of_one_problem_are_a_warning(tmp_path):
    golds = [("What is half of 1?", "1/2"), ("What is half of 1?", "0.5"), ("3 + 4?", "7"), ("3 + 4?", "8")]
    file = tmp_path / "mine.jsonl"
    output = "problems with different gold answers: 1; mine/3 has '7', mine/4 has '8'"
    for rows, expected in ((golds, [output]), (golds[:3], [])):
        file.write_text("".join(json.dumps({"problem": problem, "answer": gold}) + "\n" for problem, gold in rows))
        given = results("problems", "--dataset", str(file), "--eval_n", "0")
        assert [text.rpartition(": ")[0] for level, text in given if level == "warning"] == expected


PUBLIC = """
from math_verify import parse, verify


def verified(completions, answer, **columns):
    return [float(verify(parse(a, parsing_timeout=3), parse(c[-1]["content"])))  for c, a in zip(completions, answer)]


class Later:
    async def __call__(self, completions, grade, trainer_state, **columns):
        return [float(g.verdict == "correct") for g in grade]


later = Later()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["verified", "later"])
def test_a_reward_is_tried_where_training_calls_it(name, monkeypatch, tmp_path):
    """Math-Verify's time limit works in the main thread alone."""
    (tmp_path / "public_rewards.py").write_text(PUBLIC)
    monkeypatch.syspath_prepend(tmp_path)
    output = results("rewards", "--prompt_template", "boxed", "--rewards", f"public_rewards:{name}")
    assert [level for level, _ in output if level != "info"] == [], output


# The tokenizer


class Other:
    """The embedded tokenizer with some things changed."""

    def __init__(self, tokenizer, **changed):
        self.__dict__.update(tokenizer=tokenizer, changed=changed)

    def __getattr__(self, name):
        return self.changed[name] if name in self.changed else getattr(self.tokenizer, name)

    def __call__(self, *arguments, **named):
        return self.tokenizer(*arguments, **named)


@pytest.mark.parametrize(
    ("configured", "eos", "expected"),
    [
        (2, 2, []),
        ([2, 0], 2, []),
        (0, 0, ["error"]),  # <|endoftext|>, while a turn ends with <|im_end|>
        (0, 2, ["warning"]),  # the two disagree, and TRL stops at both
        ([0, 2], 0, []),
    ],
)
def test_the_end_of_a_turn_has_to_be_an_end_token(configured, eos, expected, tokenizer, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": configured}))
    other = Other(tokenizer, eos_token_id=eos, name_or_path=str(tmp_path))
    assert [level for level, _ in results("end_of_turn", tokenizer=other)] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "words", "changed", "levels", "output"),
    [
        ("chat_template", [], {"chat_template": None}, ["error"], "has no chat template"),
        ("chat_template", ["--prompt_template", "r1_zero"], {"chat_template": None}, [], ""),
        ("chat_template", ["--chat_template_kwargs", '{"x": true}'], {}, ["error"], "is not a variable of this model"),
        ("prompt_lengths", [], {}, ["info"], ""),
        ("memory", [], {}, ["info"], "GB at the peak"),
        (
            "prompt_lengths",
            ["--max_completion_length", "8150"],
            {},
            ["info", "error"],
            "max_position_embeddings of the model, 8192",
        ),
        (
            "prompt_lengths",
            ["--use_vllm", "--vllm_max_model_length", "560"],
            {},
            ["info", "error"],
            "vllm_max_model_length, 560",
        ),
    ],
)
def test_a_tokenizer_that_does_not_suit_the_run_is_an_error(check, words, changed, levels, output, tokenizer):
    findings = results(check, *words, tokenizer=Other(tokenizer, **changed))
    assert [level for level, _ in findings] == levels
    assert output in "".join(text for _, text in findings)


# Services


@pytest.mark.parametrize(
    ("environment", "level"),
    [
        ({"WANDB_MODE": "offline"}, ["info"]),
        ({"WANDB_API_KEY": "", "HOME": "/nonexistent"}, ["info"]),
        ({"WANDB_API_KEY": "secret", "WANDB_BASE_URL": "http://127.0.0.1:9"}, ["info"]),
    ],
)
def test_that_wandb_stays_offline_is_said_and_no_key_is_printed(environment, level, monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    output = results("trackers", "--report_to", "wandb")
    assert [level for level, _ in output] == level
    assert "secret" not in str(output)


@pytest.fixture
def server():
    server = AnsweringHTTP()
    yield server.url, server.answers
    server.stop()


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"/version": '{"version": "0.31.0+cpu"}', "/health": ""}, []),
        ({"/version": '{"version": "0.10.0"}', "/health": ""}, ["error"]),
        ({"/health": ""}, []),  # TRL's own server says no version
        ({}, ["error"]),  # something else has the port
    ],
)
def test_a_vllm_server_is_asked_for_its_version(answers, expected, server):
    url, answered = server
    answered.update(answers)
    words = ["--use_vllm", "--vllm_mode", "server", "--vllm_server_base_url", url]
    assert [level for level, _ in results("vllm_server", *words)] == expected


@pytest.fixture
def on_the_hub(server, monkeypatch):
    """A Hub that knows ada, of lovelace, by any token."""
    url, answered = server
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    ada = {"name": "ada", "orgs": [{"name": "lovelace"}], "auth": {"accessToken": {"role": "write"}}}
    answered["/api/whoami-v2"] = json.dumps(ada)
    return answered


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], []),
        (["--hub_model_id", "ada/sums", "--hub_strategy", "end"], []),
        (["--hub_model_id", "lovelace/sums"], []),
        (["--hub_model_id", "babbage/sums"], ["warning"]),
        (["--hub_model_id", "a/b/c"], ["error"]),
        (["--output_dir", "runs/my run"], ["error"]),
    ],
)
def test_a_run_that_is_to_be_pushed_has_a_name_that_the_hub_takes(words, expected, on_the_hub):
    assert [level for level, _ in results("hub", "--push_to_hub", *words)] == expected


def test_a_token_of_the_hub_is_asked_for_before_the_run(on_the_hub, monkeypatch):
    on_the_hub["/api/whoami-v2"] = json.dumps({"name": "ada", "auth": {"accessToken": {"role": "read"}}})
    [(level, text)] = results("hub", "--push_to_hub")
    assert (level, "may only read" in text) == ("error", True)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    [(level, text)] = results("hub", "--push_to_hub")
    assert (level, text) == ("warning", "the Hub cannot be asked (ConnectError): push later: grpo-math push")
    monkeypatch.delenv("HF_TOKEN")
    [(level, text)] = results("hub", "--push_to_hub")
    assert (level, "wants a token" in text) == ("error", True)


# What is evaluated where eval_n is not said


@pytest.mark.parametrize(
    ("arguments", "n", "output"),
    [
        (["--dataset", "generated:sums"], 128, "128 problems of generated:sums, test, are evaluated: 256 completions"),
        (["--dataset", "generated:products"], 41, "41 problems of generated:products, test, are evaluated"),
        (["--eval_split", "nowhere"], 0, "no verdict on the run: eval_split='nowhere' is not known"),
    ],
)
def test_a_run_that_does_not_say_what_is_evaluated_has_a_default_that_says_what_it_costs(arguments, n, output):
    asked = setup(*arguments)
    assert asked.problems.eval_n == n
    assert len(asked.problems.held_out) == n
    assert output in asked.problems.about_eval


def test_a_tenth_of_a_file_is_held_out_unless_the_recipe_chooses(tmp_path):
    problems = [f"What is {i} + 1?" for i in range(40)]
    rows = [{"problem": problem, "answer": str(i + 1)} for i, problem in enumerate(problems)]
    extra = tmp_path / "own.jsonl"
    extra.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))

    def divided(*arguments):
        asked = setup("--dataset", str(extra), *arguments).problems
        return [row["problem"] for row in asked.rows], [row["problem"] for row in asked.held_out], asked.about_eval

    train, held_out, line = divided()
    assert {*train, *held_out} == {*problems}
    assert not {*train} & {*held_out}
    assert f"{len(held_out)} of the 41 problems of {extra} are held out of training by a hash" in line
    assert divided("--eval_n", "0") == ([*problems, problems[0]], [], None)
    stated = divided("--dataset_split", "train[8:40]", "--eval_split", "train[:4]")
    assert stated[:2] == (problems[8:], problems[:4])
    assert divided("--eval_dataset", "generated:sums")[0] == [*problems, problems[0]]

"""Prompts of the user's own, and `grpo-math doctor --show`: exactly the tokens that a run is trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_math import cli
from grpo_math.errors import ConfigError, UserError
from grpo_math.problems.datasets import load_problems
from grpo_math.problems.prompts import as_template, template_of
from grpo_math.settings.recipe import read

MODULE = """
def plain(problem):
    return f"Q: {problem} Answer after ####.\\nA:"
def chat(problem):
    return [{"role": "user", "content": problem}]
def number(problem):
    return 7
"""


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("own_prompts.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


USER = {"role": "user", "content": "3 + 4?"}
PLACED = r"Solve {problem} and put \\boxed{} around {problem}."


@pytest.mark.parametrize(
    ("settings", "prompt", "answer_format"),
    [
        ({"system_prompt": "Think {hard}."}, [{"role": "system", "content": "Think {hard}."}, USER], "boxed"),
        ({"prompt_template": PLACED}, [{"role": "user", "content": PLACED.replace("{problem}", "3 + 4?")}], "boxed"),
        ({"prompt_template": "own_prompts:plain"}, "Q: 3 + 4? Answer after ####.\nA:", "gsm8k"),
        ({"prompt_template": "own_prompts:chat", "answer_format": "direct"}, [USER], "direct"),
    ],
)
def test_a_prompt_is_a_name_a_text_or_a_function(here, settings, prompt, answer_format):
    template = template_of(settings)
    assert (template.prompt("3 + 4?"), template.answer_format) == (prompt, answer_format)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt_template": "Solve this."}, "does not contain {problem}: write {problem} in the problem's place"),
        ({"prompt_template": "bxed"}, "prompt_template='bxed' is not known: did you mean 'boxed'?"),
        ({"prompt_template": "own_prompts:number"}, "returned a int: return text, or messages with role and content"),
        ({"prompt_template": "own_prompts:none"}, "names no function of own_prompts: use one of its functions: plain"),
        ({"prompt_template": "r1_zero", "system_prompt": "Mine."}, "would be ignored: r1_zero makes plain text"),
        ({"prompt_template": "{problem}", "answer_format": "box"}, "answer_format='box' is not known"),
    ],
)
def test_a_prompt_that_cannot_be_is_one_line(here, settings, message):
    with pytest.raises(ConfigError) as error:
        template_of(settings)
    assert message in str(error.value)


def test_a_system_prompt_may_be_a_file(here):
    Path("system.txt").write_text("Think first.\nThen answer after ####.\n")
    results = read(["--system_prompt", "system.txt"]).sound()
    assert results.values["system_prompt"] == "Think first.\nThen answer after ####."
    assert template_of(results.values).answer_format == "gsm8k"
    with pytest.raises(UserError, match=r"sytem\.txt cannot be read \(No such file"):
        read(["--system_prompt", "sytem.txt"]).sound()


@pytest.mark.slow
@pytest.mark.parametrize("template", ["gsm8k", "r1_zero", "Q: {problem}", "own_prompts:plain"])
def test_show_prints_the_tokens_that_are_trained_on(here, capsys, tiny, tokenizer, template):
    from datasets import Dataset

    from grpo_math.generation.completions import token_ids

    words = ["doctor", "--config", "recipe.yaml", "--show", "2", "--dataset", "generated:sums"]
    words += ["--prompt_template", template]
    Path("recipe.yaml").write_text(f"model_name_or_path: {tiny()}\n")
    capsys.readouterr()  # what torch's libraries print when they are imported first
    assert cli.main([*words, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    rows = Dataset.from_list(load_problems("generated:sums", template=as_template(template), seed=42))
    assert [one["ids"] for one in shown["prompts"]] == token_ids(
        tokenizer, [row["prompt"] for row in rows.select([0, 1])]
    )
    assert cli.main(words) == 0
    output = capsys.readouterr().out
    start = "<think>" if template == "r1_zero" else "\nA:" if ":plain" in template else "<|im_start|>assistant\n"
    assert output.count(f"{start}[the completion starts here]") == 2

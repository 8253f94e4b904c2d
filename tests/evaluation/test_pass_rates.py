"""Pass rates: the files, and the rates of a model that is measured, cut and measured again."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

from grpo_math.evaluation import backends, pass_rates
from grpo_math.problems import difficulty
from grpo_math.problems.datasets import load_problems

ABOUT = {"model": "embedded", "template": "gsm8k", "temperature": 1.0, "max_tokens": 16, "samples": 4}


def test_two_ways_of_measuring_have_two_files_beside_the_run():
    files = {pass_rates.default_file("runs/x", {**ABOUT, name: "other"}) for name in ABOUT}
    assert len(files | {pass_rates.default_file("runs/x", ABOUT)}) == len(ABOUT) + 1
    assert {file.parent.as_posix() for file in files} == {"runs/pass_rates"}


@pytest.fixture(scope="module")
def model(tiny):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny())


@pytest.fixture(scope="module")
def problems():
    return load_problems("generated:sums", limit=6)


def measured(model, tokenizer, rows, path, **kwargs):
    opened = backends.Model(model, tokenizer=tokenizer)
    return pass_rates.measure(opened, rows, path, ABOUT, batch_size=8, **kwargs)


@pytest.mark.slow
def test_a_rate_is_the_share_of_completions_that_are_right(model, tokenizer, problems, tmp_path, monkeypatch):
    """Every second completion is replaced by the gold answer, and one problem's gold by something ungradable."""
    from grpo_math.generation.completion import Completion
    from grpo_math.generation.completions import token_ids

    ids = token_ids(tokenizer, [row["prompt"] for row in problems])
    texts = {tuple(prompt): cycle(["-1", row["answer"]]) for prompt, row in zip(ids, problems, strict=True)}

    def generate(prompts, seed):
        return [Completion([1] * 4, text=f"#### {next(texts[tuple(prompt)])}") for prompt in prompts]

    monkeypatch.setattr(backends.Model, "generator", lambda model, sampling: generate)
    rows = [{**row, "answer": "" if i == 3 else row["answer"]} for i, row in enumerate(problems)]
    rates = measured(model, tokenizer, rows, tmp_path / "rates.jsonl")
    assert [rates[difficulty.key(row)] for row in rows] == [0.5, 0.5, 0.5, None, 0.5, 0.5]


@pytest.mark.slow
def test_rates_are_kept_found_again_and_gone_on_with(model, tokenizer, problems, tmp_path, monkeypatch):
    path = tmp_path / "made/rates.jsonl"
    torch.manual_seed(5)
    before = torch.get_rng_state()
    whole = measured(model, tokenizer, problems, path)
    assert torch.equal(torch.get_rng_state(), before), "a run that measures trains the same as one that does not"
    assert len(whole) == 6
    assert pass_rates.read(path, ABOUT) == whole
    path.write_text(path.read_text()[:-20])  # killed while it wrote the last problem's line
    asked = []
    generator = backends.Model.generator

    def counted(model, sampling):
        generate = generator(model, sampling)
        return lambda prompts, seed: asked.append(len(prompts)) or generate(prompts, seed)

    monkeypatch.setattr(backends.Model, "generator", counted)
    again = measured(model, tokenizer, problems, path)
    assert sum(asked) == ABOUT["samples"], "only the one that was missing"
    assert list(again.items())[:5] == list(whole.items())[:5]
    assert measured(model, tokenizer, problems, path) == again
    assert sum(asked) == ABOUT["samples"]

"""`grpo-math ask`: a run's two sides with its template and lengths, an adapter, a model."""

import pytest
from small_model import byte_tokenizer
from small_runs import write_adapter_run
from transformers import AutoModelForCausalLM

from grpo_math import evaluate
from grpo_math.errors import ConfigError
from grpo_math.evaluation import engines
from grpo_math.evaluation.ask import LoadedModels
from grpo_math.problems.prompts import as_template

QUESTION = "What is 21 + 34?"


@pytest.fixture
def run(small, tmp_path):
    return write_adapter_run(tmp_path / "run", small, "prompt_template: boxed\nmax_completion_length: 7\n")


def test_base_and_trained_answer_as_an_evaluation_would(run, small, monkeypatch):
    monkeypatch.setattr(engines, "inference_dtype", lambda path: "float32")  # without near ties
    both = LoadedModels(str(run))
    assert both.models["base"] is both.models["trained"], "the base is loaded once"
    shown: dict[str, list[str]] = {name: [] for name in both.models}
    output = {name: both.answer(name, QUESTION, show=shown[name].append) for name in both.models}
    rows = [{"prompt": as_template("boxed").prompt(QUESTION), "answer": "55"}]
    for name, adapter in (("base", None), ("trained", str(run / "adapter"))):
        (row,) = evaluate(small, rows, adapter=adapter, max_new_tokens=7, progress=False)["rows"]
        assert output[name].text == "".join(shown[name]) == row["completion"]
        assert output[name].truncated is row["truncated"]
        asked = LoadedModels(str(run), only=name)
        assert (asked.template, asked.max_new_tokens) == ("boxed", 7)
        assert list(asked.models) == [name]
        assert asked.answer(name, QUESTION).text == output[name].text
    assert output["base"].text != output["trained"].text


def test_what_is_asked_is_a_run_of_all_weights_an_adapter_or_a_model(run, small, tmp_path):
    whole, model = tmp_path / "whole", AutoModelForCausalLM.from_pretrained(small)
    model.lm_head.weight.data.neg_()
    for part in (model, byte_tokenizer()):
        part.save_pretrained(whole / "model")
    (whole / "config.yaml").write_text(f"model_name_or_path: {small}\n")
    for target, sides in ((whole, ["base", "trained"]), (run / "adapter", ["base", "trained"]), (small, ["model"])):
        asked = LoadedModels(str(target), max_new_tokens=8)
        assert (list(asked.models), asked.template) == (sides, "plain")
        assert len({asked.answer(name, "Hello").text for name in sides}) == len(sides)
    assert len({asked.answer("model", "Hi", temperature=1.0, seed=seed).text for seed in (1, 2)}) == 2


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ({"template": "boxd"}, "", "did you mean 'boxed'"),
        ({"target": "SMALL", "only": "base"}, "", "only='base' would be ignored"),
        ({"target": "nowhere"}, "", "model='nowhere' "),
        ({}, "tools: [python]\n", "is of grpo_math 0.4, not here: pass tools to the trainer of a script"),
    ],
)
def test_what_cannot_be_asked_is_one_line(arguments, settings, message, run, small):
    (run / "config.yaml").write_text((run / "config.yaml").read_text() + settings)
    arguments = {"target": str(run), **arguments}
    with pytest.raises(ConfigError, match=message):
        LoadedModels(**{name: small if value == "SMALL" else value for name, value in arguments.items()})

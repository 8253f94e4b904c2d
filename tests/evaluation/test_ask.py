"""`grpo-math ask`: a run's two sides with its template and lengths, an adapter, a model; streams and conversations."""

from __future__ import annotations

import json
from itertools import zip_longest

import pytest
from peft import PeftModel
from small_runs import write_adapter_run
from transformers import AutoModelForCausalLM

from grpo_math.cli import main
from grpo_math.evaluation import backends
from grpo_math.evaluation.ask import Asked
from grpo_math.generation.completions import token_ids, with_model
from grpo_math.generation.streaming import pieces
from grpo_math.problems.prompts import as_template
from grpo_math.report import conversation


@pytest.fixture
def run(tiny, tmp_path):
    return write_adapter_run(tmp_path / "run", tiny(), "prompt_template: boxed\nmax_completion_length: 7\n")


@pytest.mark.slow
def test_base_and_trained_answer_in_turns_as_an_evaluation_would(run, tiny, tokenizer, monkeypatch, capsys):
    monkeypatch.setattr(backends, "fast_dtype", lambda: "float32")  # without near ties
    asked = Asked(str(run))
    assert (asked.template, asked.max_new_tokens, list(asked.sides)) == ("boxed", 7, ["base", "trained"])
    streams = asked.answers("What is 21 + 34?")
    output = dict.fromkeys(streams, "")
    for pieces_of_both in zip_longest(*streams.values(), fillvalue=""):
        for name, piece in zip(streams, pieces_of_both, strict=True):
            output[name] += piece
    base = AutoModelForCausalLM.from_pretrained(tiny())
    prompt = [as_template("boxed").prompt("What is 21 + 34?")]
    for name in ("base", "trained"):
        model = base if name == "base" else PeftModel.from_pretrained(base, run / "adapter")
        generate = with_model(model, tokenizer, temperature=0.0, max_new_tokens=7)
        assert output[name] == generate(token_ids(tokenizer, prompt), 0)[0].text
    assert output["base"] != output["trained"]
    assert main(["ask", str(run), "What is 21 + 34?"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("base:\n")
    assert "\ntrained:\n" in out
    assert main(["ask", str(run), "What is 21 + 34?", "--only", "trained", "--json"]) == 0
    answered = json.loads(capsys.readouterr().out)
    assert (answered["template"], answered["answers"]) == ("boxed", {"trained": output["trained"]})


def test_a_conversation_goes_on_until_it_is_forgotten(run, monkeypatch, capsys):
    lines = iter(["Hello", "", "And now?", "/help", "/new", "Hello"])

    def typed(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    asked, prompts = Asked(str(run), only="trained"), []
    side = asked.sides["trained"]
    inner = asked._prompt
    monkeypatch.setattr(asked, "_prompt", lambda *given: prompts.append(inner(*given)) or prompts[-1])
    monkeypatch.setattr("builtins.input", typed)
    conversation.converse(asked.answers, asked.forget)
    assert [len(prompt) for prompt in prompts] == [2, 4, 2]
    assert [message["role"] for message in prompts[1]] == ["system", "user", "assistant", "user"]
    assert len(side.messages) == 3
    assert capsys.readouterr().out.count(conversation.HELP) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "--json"], "--json answers one question"),
        (["RUN", "Hi", "--template", "boxd"], "did you mean 'boxed'"),
        (["TINY", "Hi", "--only", "base"], "only='base' would be ignored"),
        (["nowhere", "Hi"], "model='nowhere' "),
    ],
)
def test_what_cannot_be_asked_is_one_line(arguments, message, run, tiny, capsys):
    words = [str(run) if word == "RUN" else tiny() if word == "TINY" else word for word in arguments]
    assert main(["ask", *words]) == 2
    output = capsys.readouterr().err.strip().splitlines()
    assert message in output[-1]


def test_what_a_model_says_moves_no_cursor():
    output = "".join(conversation.shown({"model": iter(["\x1b[2J\x1b]0;owned\x07", "7"])}))
    assert "\x1b" not in output
    assert "\x07" not in output


def test_a_character_of_several_tokens_comes_whole(tokenizer):
    text = "7 🦉 and ∑"
    streamed = list(pieces(tokenizer, iter(tokenizer(text)["input_ids"])))
    assert "".join(streamed) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in streamed)

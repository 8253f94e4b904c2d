"""`grpo-math ask`: one question, the lines of a pipe, JSON."""

import io
import json
from unittest.mock import Mock

import pytest

from grpo_math.cli import main
from grpo_math.evaluation import ask
from grpo_math.generation.completion import Completion

CUT = "(cut at the token limit: --max_completion_length N allows more)"
SHOWN = "7\n\t8\\x1b]0;owned\\x07"  # what a model says moves no cursor


@pytest.fixture
def asked(monkeypatch):
    """Two models: one answers with the question and how it is asked, one with what could take over a terminal."""
    asked = Mock(template="boxed", max_new_tokens=7, models=["base", "trained"])

    def answer(name, question, temperature, seed, show=lambda text: None):
        pieces = [question, str(temperature), str(seed)] if name == "base" else ["7\n\t8", "\x1b]0;owned\x07"]
        for piece in pieces:
            show(piece)
        return Completion([], text="".join(pieces), truncated=name == "base")

    asked.answer = answer
    monkeypatch.setattr(ask, "LoadedModels", Mock(return_value=asked))
    return asked


def test_one_question_is_answered_by_both_models_or_as_json(asked, capsys):
    words = ["ask", "run", "--temperature", "0.5", "2 + 2?", "--seed", "3"]
    assert main(words) == 0
    ask.LoadedModels.assert_called_with("run", None, None, None, None)
    assert capsys.readouterr().out == f"base:\n2 + 2?0.53\n{CUT}\ntrained:\n{SHOWN}\n"
    assert (
        main(
            [
                *words,
                "--json",
                "--only",
                "base",
                "--template",
                "plain",
                "--max_completion_length",
                "9",
                "--checkpoint",
                "best",
            ]
        )
        == 0
    )
    ask.LoadedModels.assert_called_with("run", "base", "plain", 9, "best")
    assert json.loads(capsys.readouterr().out) == {
        "question": "2 + 2?",
        "template": "boxed",
        "answers": {"base": "2 + 2?0.53", "trained": "7\n\t8\x1b]0;owned\x07"},
        "truncated": ["base"],
    }
    assert main(["ask", "run", "--json"]) == 2
    assert "--json answers one question" in capsys.readouterr().err


def test_each_line_of_a_pipe_is_a_question_of_its_own(asked, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n\n And now? \n"))
    assert main(["ask", "run"]) == 0
    one, two = (f"base:\n{question}0.00\n{CUT}\ntrained:\n{SHOWN}\n" for question in ("Hello", "And now?"))
    assert capsys.readouterr().out == one + two


@pytest.mark.parametrize("is_terminal", [True, False])
def test_without_a_question_nothing_is_loaded(is_terminal, asked, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", Mock(isatty=lambda: is_terminal, __iter__=lambda _: iter(["\n"])))
    assert main(["ask", "run"]) == 2
    line = "error: the question is missing: give it behind the run or model, or pipe one on each line\n"
    assert capsys.readouterr().err == line
    ask.LoadedModels.assert_not_called()


def test_without_a_network_the_hub_is_asked_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    (tmp_path / "rows.jsonl").write_text('{"problem": "Double 14.", "answer": "28"}')
    for words in (["ask", "no/such", "2 + 2?"], ["evaluate", "--model", "no/such", "--data", f"{tmp_path}/rows.jsonl"]):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        assert main(words) == 2
        note, error = capsys.readouterr().err.splitlines()
        assert note.endswith("does not answer in 5 seconds: only files in the Hub's cache are read")
        assert error.startswith("error: model='no/such' has no configuration or tokenizer that can be loaded")

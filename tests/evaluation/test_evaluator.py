"""An evaluation: its results by hand, and answers that continue where they were cut."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from grpo_math import evaluate
from grpo_math.errors import ConfigError
from grpo_math.evaluation import evaluator
from grpo_math.evaluation.evaluation import journal_file, read, write
from grpo_math.evaluation.fingerprint import weights_hash
from grpo_math.evaluation.stats import wilson_for_means
from grpo_math.generation.completions import batch_seed
from grpo_math.generation.dtypes import inference_dtype
from grpo_math.generation.request import Request
from grpo_math.grading import GRADER
from grpo_math.problems.datasets import load_problems


def problem(name: str, text: str, gold: str, **more) -> dict:
    return {"id": name, "problem": text, "prompt": f"{text}\n", "answer": gold, "answer_format": "gsm8k"} | more


ROWS = [problem("a", "2 + 2?", "4", level=1), problem("b", "What is 3 + 4?", "7", level=2, tolerance=0.5)]
TEXTS = {"2 + 2?": ["#### 4", "#### 5"], "3 + 4?": ["It is 7.", "#### 7.25", "so", "and so on"]}


def test_a_thought_that_the_prompt_opens_and_that_does_not_end_has_no_answer(small, script):
    script({"2 + 2?": ["#### 4", "so </think> #### 4"]})
    rows = [problem("a", "2 + 2?", "4", prompt="2 + 2? <think>")]
    answer = evaluate(small, rows, samples=2, temperature=0.5, max_new_tokens=30)
    assert [(row["completion"], row["verdict"]) for row in answer["rows"]] == [
        ("#### 4", "no_answer"),
        ("so </think> #### 4", "correct"),
    ]


def test_words_of_the_problem_behind_the_number_are_in_the_format(small, script):
    script({"pears": ["#### 4 pears", "#### 4 plums"]})
    answer = evaluate(small, [problem("a", "How many pears?", "4")], samples=2, temperature=0.5, max_new_tokens=30)
    assert [(row["verdict"], row["in_format"]) for row in answer["rows"]] == [("correct", True), ("correct", False)]


def test_the_results_by_hand(small, script, capsys, tmp_path):
    batches = script(TEXTS)
    asked = {"samples": 2, "temperature": 0.5, "max_new_tokens": 10, "batch_size": 3, "seed": 5}
    answer = evaluate(small, ROWS, extra={"data": "sums"}, output=tmp_path / "results.json", **asked)
    assert batches == [(["2 + 2?", "2 + 2?", "3 + 4?"], batch_seed(5, 0)), (["3 + 4?"], batch_seed(5, 1))]
    progress = capsys.readouterr().err
    assert all(words in progress for words in ("evaluating: 100%", " 2/2 [", "accuracy 75.0%]"))
    a = {"id": "a", "problem": "2 + 2?", "gold": "4", "level": 1, "in_format": True, "tokens": 7, "truncated": False}
    b = {"id": "b", "problem": "What is 3 + 4?", "gold": "7", "level": 2, "tolerance": 0.5}
    rows = [
        a | {"sample": 0, "completion": "#### 4", "verdict": "correct", "answer": "4", "category": "correct"},
        a | {"sample": 1, "completion": "#### 5", "verdict": "wrong", "answer": "5", "category": "wrong_answer"},
        b
        | {"sample": 0, "completion": "It is 7.", "verdict": "correct", "answer": "7", "in_format": False}
        | {"category": "correct_answer_bad_format", "tokens": 9, "truncated": False},
        b
        | {"sample": 1, "completion": "#### 7.25", "verdict": "correct", "answer": "7.25", "in_format": True}
        | {"category": "correct", "tokens": 10, "truncated": False},  # within the tolerance
    ]
    assert answer["rows"] == rows
    evaluation = read(answer["results"])
    assert (
        evaluation.to_dict()
        == answer
        == {**json.loads(Path(answer["results"]).read_text()), "results": evaluation.path}
    )
    assert answer.pop("results") == str(tmp_path / "results.json")
    assert answer["request"].pop("dtype")
    for name in ("versions", "prompt_hash", "problems_hash", "weights_hash"):
        assert answer.pop(name)
    assert answer.pop("seconds") >= 0
    assert answer == {
        "format": 1,
        "grader": GRADER,
        "model": small,
        "adapter": None,
        "backend": "hf",
        "data": "sums",
        "answer_format": "gsm8k",
        **asked,
        "request": Request(temperature=0.5, max_new_tokens=10).to_dict(),
        "n": 2,
        "accuracy": 0.75,
        "ci95": [*wilson_for_means([0.5, 1], 4)],
        "accuracy_in_format": 0.5,
        "mean@n": {"n": 2, "mean": 0.75, "ci95": [*wilson_for_means([0.5, 1], 4)]},
        **{name: answer[name] for name in ("categories", "pass@k", "maj@k", "pass@k_ci95", "maj@k_ci95", "by_level")},
        "prompt_of_first_row": "2 + 2?\n",
        "rows": rows,
    }


# Going on where it was cut: 6 problems x 4 completions in 5 batches

SAMPLED = {"samples": 4, "temperature": 1.0, "max_new_tokens": 8, "batch_size": 5, "progress": False}


@pytest.fixture(scope="module")
def six():
    return load_problems("generated:sums", "heldout", limit=6)


@pytest.fixture(scope="module")
def journal():
    """The lines of the file that stored the answers of `whole`, which is gone."""
    return []


@pytest.fixture(scope="module")
def whole(small, six, journal, tmp_path_factory):
    """The results of an evaluation that was not interrupted."""

    def write_and_read(evaluation, path):
        write(evaluation, path)
        journal.extend(journal_file(path).read_bytes().splitlines(keepends=True))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluator, "write", write_and_read)
        results = evaluate(small, six, output=tmp_path_factory.mktemp("whole") / "results.json", **SAMPLED)
    assert [path.name for path in Path(results["results"]).parent.iterdir()] == ["results.json"]
    return results


def test_a_file_that_was_cut_anywhere_gives_the_same_answers_and_asks_only_for_what_it_lacks(
    small, six, whole, journal, tmp_path, monkeypatch
):
    lines = journal
    assert len(lines) == 1 + 24
    measured = json.loads(lines[0])["measured"]
    assert measured["weights_hash"] == weights_hash(small, None)
    assert measured["request"]["dtype"] == inference_dtype(small)
    asked = Mock(side_effect=batch_seed)  # once for each batch
    monkeypatch.setattr(evaluator, "batch_seed", asked)
    for complete, batches in ((24, []), (19, [3, 4]), (11, [2, 3, 4]), (0, [0, 1, 2, 3, 4])):
        part = b"".join(lines[: complete + 1]) + (lines[complete + 1][:20] if complete < 24 else b"")
        journal_file(tmp_path / f"{complete}.json").write_bytes(part)
        assert evaluate(small, six, output=tmp_path / f"{complete}.json", **SAMPLED)["rows"] == whole["rows"]
        assert [call.args[1] for call in asked.mock_calls] == batches
        assert json.loads((tmp_path / f"{complete}.json").read_text())["accuracy"] == whole["accuracy"]
        asked.reset_mock()


def test_complete_answers_are_read_without_the_weights(small, six, whole, script):
    script({})  # no problem has an answer to give
    assert evaluate(small, six, output=whole["results"], **SAMPLED)["rows"] == whole["rows"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 3}, "seed=0, not 3: give another --output, or change"),
        ({"batch_size": 6}, "batch_size=5, not 6"),
        ({"extra": {"data": "gsm8k"}}, "data=None, not 'gsm8k'"),
        ({"problems": slice(5)}, "problems_hash="),
    ],
)
def test_answers_of_another_evaluation_are_refused(changes, words, small, six, whole):
    asked = {"problems": slice(6), **SAMPLED, **changes}
    file = Path(whole["results"])
    before = file.read_bytes()
    with pytest.raises(ConfigError, match=f"output='.*' was measured with {words}"):
        evaluate(small, six[asked.pop("problems")], output=whole["results"], **asked)
    assert file.read_bytes() == before


def test_a_file_of_something_else_is_not_written_over(small, tmp_path):
    (tmp_path / "before.json").write_text("mine")
    with pytest.raises(ConfigError, match="is not a results file: give another --output"):
        evaluate(small, ROWS, output=tmp_path / "before.json", progress=False)
    assert (tmp_path / "before.json").read_text() == "mine"


def test_a_folder_gets_a_file_for_each_way_of_evaluating(small, script, tmp_path):
    script(TEXTS)
    asked = {"output": tmp_path, "progress": False, "extra": {"data": "a:b-1.5B"}}
    files = [Path(evaluate(small, ROWS, max_new_tokens=n, **asked)["results"]) for n in (20, 30, 20)]
    assert files[0] == files[2] != files[1]
    assert sorted(tmp_path.glob("small-a_b-1.5B-????????.json")) == sorted(set(files))


@pytest.mark.parametrize(
    ("rows", "settings", "words"),
    [
        (ROWS, {"samples": 4}, "samples=4 cannot be drawn at temperature 0: give 1, or a temperature above 0"),
        (ROWS, {"samples": 0}, "samples=0 evaluates nothing: give 1 or more"),
        (ROWS, {"temperature": -1}, "temperature=-1 is out of range"),
        (ROWS, {"temperature": float("inf")}, "temperature=inf is out of range"),
        (ROWS, {"batch_size": 0}, "batch_size=0 evaluates nothing"),
        ([], {}, "rows=0 leaves nothing to evaluate on"),
        ([*ROWS, ROWS[0]], {}, "rows=3 share an id"),
        ([problem("long", "7" * 2047, "7")], {}, "max_position_embeddings=2048, and the longest prompt 2048 tokens"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(rows, settings, words, small):
    with pytest.raises(ConfigError, match=words):
        evaluate(small, rows, progress=False, **settings)

"""What is evaluated and how: the models of a run, and data sets as their authors score them."""

import json

import pytest

from grpo_math.errors import ConfigError, UserError
from grpo_math.evaluation import from_run, suite
from grpo_math.evaluation.summary import as_published
from grpo_math.generation.request import Request
from grpo_math.grading import Grade, Verdict, grade_batch
from grpo_math.problems.prompts import as_template
from grpo_math.run.resume import problem_hashes, write_problems


@pytest.fixture
def run(tmp_path):
    """A run directory with the marks of an adapter."""
    for name in ("adapter", "checkpoint-7"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
        (tmp_path / name / "adapter.safetensors").write_bytes(b"")
    (tmp_path / "config.yaml").write_text(
        "model_name_or_path: base\nprompt_template: boxed\nmax_completion_length: 6\n"
    )
    return tmp_path


def test_a_run_has_its_base_its_trained_weights_and_its_settings(run, monkeypatch):
    models = {"base": ("base", None), "trained": ("base", str(run / "adapter"))}
    request = Request(template="boxed", temperature=0.0, max_new_tokens=6)
    assert from_run.read(str(run)) == from_run.RunModels(models, run / "evaluation", as_template("boxed"), request, {})
    models["trained"] = ("base", str(run / "checkpoint-7"))
    (run / "best.json").write_text('{"path": "checkpoint-7"}')
    for name in ("checkpoint-7", "best"):
        assert from_run.read(str(run), checkpoint=name) == from_run.RunModels(
            models, run / "evaluation-checkpoint-7", as_template("boxed"), request, {}
        )
    removed = {"tools": [], "python": None, "max_tool_calling_iterations": 5}  # of 0.4
    (run / "config.yaml").write_text(
        json.dumps({"model_name_or_path": "owner/name", "model_revision": "v2", "prompt_template": "boxed", **removed})
    )
    (run / "adapter").rename(run / "model")
    (run / "model/adapter_config.json").rename(run / "model/config.json")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, revision: f"/cache/{name}/{revision}")
    models = {"base": ("/cache/owner/name/v2", None), "trained": (str(run / "model"), None)}
    request = Request(template="boxed")
    assert from_run.read(str(run), str(run / "mine")) == from_run.RunModels(
        models, run / "mine", as_template("boxed"), request, {}
    )


def test_the_problems_that_a_run_was_trained_on_are_counted(run):
    rows = [{"problem": f"{n} + 1?", "answer": str(n + 1)} for n in range(3)]
    assert from_run.trained_on(str(run), rows) == 0
    write_problems(run, problem_hashes(rows[:2]))
    assert from_run.trained_on(str(run), rows) == 2


def test_a_run_without_a_data_set_has_no_problems_of_its_own(run):
    with pytest.raises(UserError, match=r"the run's config\.yaml names no data set"):
        from_run.own_set(str(run), as_template("boxed"))


@pytest.mark.parametrize("data", ["gsm8k,", "gsm8k,gsm8k"])
def test_a_list_of_sets_names_each_set_once(data):
    with pytest.raises(ConfigError, match="names nothing, or one set twice"):
        suite.sets(data, None)


@pytest.mark.parametrize(
    ("name", "output", "message"),
    [
        ("adapter", None, "has neither adapter/ nor model/, so it has not finished: repeat the command"),
        ("config.yaml", None, "has no config.yaml with a model name"),
        ("", "one.json", "output='one.json' is one file, and --run writes two: give a folder"),
    ],
)
def test_a_run_that_cannot_be_evaluated_is_one_line(name, output, message, run):
    if name:
        (run / name).rename(run / "gone")
    with pytest.raises(ConfigError, match=message):
        from_run.read(str(run), output)


def test_a_number_within_the_authors_tolerance_is_right():
    late = Grade(Verdict.UNCHECKABLE, "2.5")
    assert as_published(late, "2.5", 0.1) == late
    rows = [{"answer": "2.5", "tolerance": 0.0625}, {"answer": "2.5", "tolerance": 0.0624}, {"answer": "2.5"}]
    grades = grade_batch(["2.5"] * 3, [r"\boxed{2.4375}"] * 3)
    grades = [as_published(grade, "2.5", row.get("tolerance")) for grade, row in zip(grades, rows, strict=True)]
    assert [str(grade.verdict) for grade in grades] == ["correct", "wrong", "wrong"]
    for answer, gold in (("x", "2.5"), ("2.5", "x"), (None, "2.5")):
        assert as_published(Grade(Verdict.WRONG, answer), gold, 0.0625).verdict is Verdict.WRONG

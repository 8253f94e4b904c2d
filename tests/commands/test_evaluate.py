"""`grpo-math evaluate` of a run, whose base and trained model are compared, and of several data sets."""

import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
from small_runs import write_adapter_run

from grpo_math.cli import main
from grpo_math.evaluation import engines, evaluator
from grpo_math.generation.request import DEFAULT_REQUEST
from grpo_math.problems.datasets import load_problems
from grpo_math.report.page import report
from grpo_math.report.run_dir import read_run
from grpo_math.run.resume import problem_hashes, write_problems

ASKED = ["--data", "generated:sums", "--split", "heldout", "--n", "4", "--batch_size", "4"]


@pytest.fixture
def trained(small, tmp_path):
    text = 'prompt_template: "boxed"  # quoted\nmax_completion_length: 6\ngrade_timeout: 2.5\n'
    return write_adapter_run(tmp_path / "run", small, text)


def test_base_and_trained_are_asked_the_same_and_compared(trained, small, script, capsys, monkeypatch):
    write_problems(trained, problem_hashes(load_problems("generated:sums", "heldout", limit=3)))
    monkeypatch.setattr(evaluator, "grade_batch", Mock(wraps=evaluator.grade_batch))
    assert main(["evaluate", "--run", str(trained), *ASKED]) == 0
    text, err = capsys.readouterr()
    assert f"warning: 3 of the 4 problems of generated:sums are training problems of {trained}: " in err
    assert {call.kwargs["timeout"] for call in evaluator.grade_batch.call_args_list} == {2.5}
    table, *_, first, second = text.splitlines()
    files = [trained / f"evaluation/generated_sums/{name}.json" for name in ("base", "trained")]
    assert [first, second] == [f"results   {file}" for file in files]
    assert table.split() == ["before", "after", "difference", "95%", "paired", "interval"]
    base, after = (json.loads(file.read_text()) for file in files)
    asked = {
        "model": small,
        "data": "generated:sums",
        "split": "heldout",
        "answer_format": "boxed",
        "max_new_tokens": 6,
    }
    assert base.items() >= (asked | {"adapter": None}).items()
    assert after.items() >= (asked | {"adapter": str(trained / "adapter")}).items()
    changed = {name for name in base if base[name] != after[name]}
    assert {"weights_hash", "rows"} <= changed <= base.keys() - {"prompt_hash", "problems_hash", "samples", "n"}
    script({})  # all answers are there
    assert main(["evaluate", "--run", str(trained), *ASKED, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer.keys() == {"base", "trained", "comparison"}
    assert main(["evaluate", "--run", str(trained), *ASKED, "--contamination", "generated:sums:heldout"]) == 0
    assert "generated:sums: contamination: 4 of 4 problems (100.0%) overlap" in capsys.readouterr().out
    assert answer["trained"] == {name: after[name] for name in after if name != "rows"} | {
        "results": str(files[1]),
        "seconds": answer["trained"]["seconds"],
    }
    assert answer["comparison"]["n"] == 4
    assert [side.path for side in read_run(trained).sides.values()] == [str(file) for file in files]


def test_a_run_alone_is_evaluated_on_the_problems_that_its_training_evaluates(trained, script, capsys):
    script({"What is": ["1"]})
    config = trained / "config.yaml"
    before = config.read_text()
    config.write_text(f"{before}dataset: generated:sums\neval_split: heldout\neval_n: 3\nseed: 7\n")
    own = [row["id"] for row in load_problems("generated:sums", "heldout", limit=3)]
    for words, n in ((["--run", str(trained)], 3), ([str(trained), "--n", "2"], 2)):
        assert main(["evaluate", *words, "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)["trained"]
        rows = json.loads(Path(answer["results"]).read_text())["rows"]
        assert ([row["id"] for row in rows], answer["split"], answer["answer_format"]) == (own[:n], "heldout", "boxed")
        for file in Path(answer["results"]).parent.iterdir():
            file.unlink()
    assert main(["evaluate", str(trained), "--columns", "problem=x"]) == 2
    assert "columns='problem=x' is for --data" in capsys.readouterr().err
    config.write_text(before)
    assert main(["evaluate", str(trained)]) == 2
    assert "--data is missing: the run's config.yaml names no data set" in capsys.readouterr().err


def test_several_sets_of_a_run_have_a_folder_each_in_that_of_the_checkpoint(trained, script, capsys):
    script({"What is": ["1"]})
    (trained / "adapter").rename(trained / "checkpoint-7")
    words = ["--data", "generated:sums,generated:long_products", "--split", "heldout", "--n", "2"]
    assert main(["evaluate", "--run", str(trained), *words, "--checkpoint", "checkpoint-7"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "                         n  mean@  base  trained   difference  95% paired interval",
        "generated:sums           2      1  0.0%     0.0%  +0.0 points       [-84.2, +84.2]",
        "generated:long_products  2      1  0.0%     0.0%  +0.0 points       [-84.2, +84.2]",
        f"results   {trained}/evaluation-checkpoint-7/generated_sums/base.json",
        f"results   {trained}/evaluation-checkpoint-7/generated_long_products/base.json",
        f"results   {trained}/evaluation-checkpoint-7/generated_sums/trained.json",
        f"results   {trained}/evaluation-checkpoint-7/generated_long_products/trained.json",
    ]


def test_each_set_of_a_run_has_its_own_files_and_a_row_in_the_report(trained, script, capsys):
    script({"What is": ["1"]})
    words = ["evaluate", "--run", str(trained), "--split", "heldout", "--n", "2", "--data"]
    assert [main([*words, "generated:products"]), read_run(trained).sets] == [0, []]
    assert main([*words, "generated:sums"]) == 0
    run = read_run(trained)
    assert [(before.data, after.data) for before, after in run.sets] == [
        (f"generated:{name}",) * 2 for name in ("products", "sums")
    ]
    assert (run.before, run.after) == run.sets[0]
    assert "note" not in capsys.readouterr().err
    # The evaluations of training come first, and a set that they have comes once.
    for name, side in zip(("before", "after"), run.sets[1], strict=True):
        (trained / f"{name}.json").write_text(json.dumps(side.to_dict() | {"data": "own"}))
    text = report(trained).html.read_text()
    assert re.findall(r'<tr><th scope="row">(own|gen[^<]*)</th><td>(\d+)', text) == [
        (data, "2") for data in ("own", "generated:products")
    ]
    assert main([*words, "generated:sums"]) == 0
    files = f"{trained}/before.json and {trained}/after.json"
    note = f"note     training has evaluated these problems of generated:sums already: {files}\n"
    assert note in capsys.readouterr().err
    assert main([*words, "generated:sums", "--samples", "2", "--temperature", "1", "--output", str(trained / "x")]) == 0
    assert "note" not in capsys.readouterr().err


def test_an_adapter_given_as_the_model_is_evaluated_on_its_base(trained, small, script, capsys, tmp_path):
    script({"What is": ["1"]})
    words = ["evaluate", "--model", str(trained / "adapter"), *ASKED, "--output", str(tmp_path / "a.json")]
    assert main([*words, "--contamination", "generated:sums:heldout"]) == 0
    first, *_, overlap, path = capsys.readouterr().out.splitlines()
    assert first == "4 problems, greedy"
    assert overlap.startswith("generated:sums: contamination: 4 of 4 problems (100.0%) overlap")
    assert path == f"results   {tmp_path / 'a.json'}"
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["model"], answer["adapter"], answer["max_new_tokens"]) == (small, str(trained / "adapter"), 512)
    assert main([*words, "--adapter", "x"]) == 2
    assert "is an adapter itself" in capsys.readouterr().err


def folder(path: Path, row: dict) -> None:
    path.mkdir(parents=True)
    (path / "test.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")


def test_several_sets_give_one_table_and_load_the_model_once(tmp_path, small, script, capsys, monkeypatch):
    monkeypatch.setenv("GRPO_MATH_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    folder(tmp_path / "data" / "aime2025", {"id": "0", "problem": "What is 3 + 4?", "answer": "7"})
    folder(tmp_path / "data" / "minerva", {"question": "What is 3 + 5?", "answer": "8"})
    monkeypatch.setattr(engines, "load_weights", Mock(wraps=engines.load_weights))
    asked = [
        *("evaluate", "--model", small, "--dataset", "aime2025,generated:sums,minerva"),
        *("--n", "2", "--max_completion_length", "4", "--batch_size", "4"),
    ]
    assert main([*asked, "--json"]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["sets"]  # DeepSpeed says hello
    assert list(results) == ["aime2025", "generated:sums", "minerva"]
    engines.load_weights.assert_called_once_with(small, None, DEFAULT_REQUEST)
    kept = [json.loads(Path(of["results"]).read_text()) for of in results.values()]
    assert [(one["answer_format"], one["samples"], one["temperature"]) for one in kept] == [
        ("boxed", 32, 0.6),
        ("gsm8k", 1, 0.0),
        ("boxed", 1, 0.0),
    ]
    assert kept[2]["rows"][0]["tolerance"] == pytest.approx(8e-5)
    script({})  # all answers are there
    assert main(asked) == 0
    assert capsys.readouterr().out.splitlines() == [
        "                n  mean@  accuracy  95% interval  in format     cut",
        "aime2025        1     32      0.0%  0.0 to 79.3%       0.0%  100.0%",
        "generated:sums  2      1      0.0%  0.0 to 65.8%       0.0%  100.0%",
        "minerva         1      1      0.0%  0.0 to 79.3%       0.0%  100.0%",
        "mean of 3                     0.0%",
        *(f"results   {of['results']}" for of in results.values()),
    ]


MODEL = ["--model", "embedded"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*MODEL, "--data", "gsm8k", "--suite", "math"], "--suite would be ignored by --data"),
        ([*MODEL, "--suite", "maths"], "suite='maths' is not known: did you mean 'math'?"),
        (MODEL, "--data is missing"),
        (["--data", "gsm8k"], "--model is missing"),
        ([*MODEL, "--data", "gsm8k,gsm8k"], "data='gsm8k,gsm8k' names nothing, or one set twice"),
        ([*MODEL, "--data", "gsm8k,,math500"], "names nothing, or one set twice"),
        ([*MODEL, "--data", "generated,gsm9k"], "dataset='gsm9k' is not known: did you mean 'gsm8k'?"),
        (
            [*MODEL, "--data", "gsm8k,math500", "--output", "x.json"],
            "output='x.json' is for one data set, and there are 2",
        ),
        (
            [*MODEL, "--data", "gsm8k,math500", "--columns", "id=x"],
            "columns='id=x' is for one data set, and there are 2",
        ),
        ([*MODEL, "--data", "gsm8k", "--checkpoint", "best"], "--checkpoint would be ignored without --run"),
        ([*MODEL, "--run", "run"], "--model would be ignored by --run"),
        (["--compare", "damaged.json", "damaged.json"], "damaged.json cannot be read (TypeError: "),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(arguments, message, tmp_path, capsys, monkeypatch):
    folder(tmp_path / "gsm8k", {"question": "What is 3 + 4?", "answer": "#### 7"})
    monkeypatch.setenv("GRPO_MATH_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("damaged.json").write_text('{"format": 1, "rows": [{"category": "correct"}]}')
    assert main(["evaluate", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line

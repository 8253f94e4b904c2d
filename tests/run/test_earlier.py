"""Files of an earlier run move to earlier/N, and nothing is deleted. Files of the user stay, or make way."""

from grpo_math.run import earlier

MARKED = '{"step": 1, "problems_hash": ""}'


def tree(run_dir):
    return sorted(str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file())


def test_a_run_that_begins_or_resumes_has_no_results_of_earlier_weights(tmp_path):
    results = [
        f"evaluation/{name}" for name in ("trained.json", "trained.answers.jsonl", "base.json", "x/trained.json")
    ]
    for name in ("finished.json", "before.json", "after.json", "evaluation-checkpoint-7/trained.json", *results):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(MARKED)
    earlier.archive_results(tmp_path, is_new=False)
    first = [f"earlier/1/{name}" for name in ("after.json", *sorted(set(results) - {"evaluation/base.json"}))]
    kept = ["before.json", "evaluation-checkpoint-7/trained.json", "evaluation/base.json"]
    assert tree(tmp_path) == sorted([*first, *kept])
    earlier.archive_results(tmp_path, is_new=True)
    assert tree(tmp_path) == sorted([*first, *(f"earlier/2/{name}" for name in kept)])
    earlier.archive_results(tmp_path / "new", is_new=True)


def test_a_file_of_the_user_stays_or_makes_way_and_the_line_names_it(tmp_path, capsys):
    for name in ("config.yaml", "finished.json", "report.html", "before.json", "adapter/mine"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    (tmp_path / "history.jsonl").touch()
    assert earlier.run_files(tmp_path) == []
    earlier.archive(tmp_path, earlier.in_the_way(tmp_path, earlier.TRAINING))
    assert capsys.readouterr().err == f"moved    config.yaml, finished.json to {tmp_path}/earlier/1\n"
    assert tree(tmp_path) == [
        *("adapter/mine", "before.json", "earlier/1/config.yaml", "earlier/1/finished.json"),
        *("history.jsonl", "report.html"),
    ]

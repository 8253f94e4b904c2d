"""Large data sets: prepared once for all runs, with the rows that a list has, and never half."""

import json
import os
import signal

import datasets as hub_datasets
import pytest
from small_runs import size_limit  # noqa: F401 -- a fixture

from grpo_math.problems import datasets, stored
from grpo_math.problems.datasets import load_problems, problem_table
from grpo_math.problems.from_recipe import RecipeProblems
from grpo_math.problems.prompts import as_template
from grpo_math.problems.stored import Stored
from grpo_math.run import files
from grpo_math.run.bar import Bar
from grpo_math.settings.recipe import read

N = 2 * stored.BATCH + 500
# The types of the columns show only after the first batch.
ROWS = [
    {"question": f"What is {i} + {i % 7}?", "answer": i + i % 7, "id": i % 2000}
    | {"level": "Level 3", "late": i if i >= stored.BATCH else None, "half": i if i < 2000 else 0.5}
    | {"kinds": i if i < N - 1 else "a", "nested": {"a": 1} if i < 1500 else {"b": ["x"]}, "options": None}
    for i in range(N)
]


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file of `ROWS` and a bad row, as a large data set; the cache is in its folder."""
    monkeypatch.setattr(hub_datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets, "LARGE", 0)
    path = tmp_path / "many.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in [*ROWS, {}]))
    return path


def prepared(file, template="direct", **options):
    return problem_table(
        str(file), "train", template=as_template(template), columns=None, skip_bad_rows=True, **options
    )


@pytest.mark.parametrize("options", [{}, {"limit": 2200, "seed": 1}, {"template": "xml"}, {"template": "as_is"}])
def test_the_table_is_that_of_the_list_and_is_read_once(file, options, monkeypatch, capsys, caplog):
    expected = hub_datasets.Dataset.from_list(
        load_problems(str(file), skip_bad_rows=True, **{"template": "direct", **options})
    )
    warnings = caplog.messages[:]
    table = prepared(file, **options)
    assert table.features == expected.features
    assert table.to_list() == expected.to_list()
    (kept,) = (file.parent / "cache/grpo_math").glob("*.arrow")
    assert capsys.readouterr().err.endswith(f"the problems of {file} are kept in {kept}, and used again\n")
    monkeypatch.setattr(datasets, "read_table", lambda *_: pytest.fail("read again"))
    assert prepared(file, **options).to_list() == expected.to_list()
    assert "as an earlier process prepared them" in capsys.readouterr().err
    assert caplog.messages == 3 * warnings


def test_a_file_that_has_changed_is_read_again(file):
    before = prepared(file).to_list()
    # The same size, and the same time of change.
    times = file.stat()
    file.write_text(file.read_text().replace("What is 7 + 0?", "What is 7 - 0?"))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert [one["problem"] for one in prepared(file) if one not in before] == ["What is 7 - 0?"]


def test_the_words_of_the_grader_and_the_built_in_sets_are_a_part_of_the_code(tmp_path, monkeypatch):
    (tmp_path / "problems").mkdir()
    monkeypatch.setattr(stored, "__file__", str(tmp_path / "problems/stored.py"))
    hashes = set()
    for name, text in (("a.py", "1"), ("words.json", "1"), ("words.json", "2"), ("sets.yaml", "1"), ("a.pyc", "1")):
        (tmp_path / name).write_text(text)
        hashes.add(stored._code.__wrapped__())
    assert len(hashes) == 4


def test_a_preparation_that_is_killed_leaves_nothing_that_is_used(file, monkeypatch):
    if (child := os.fork()) == 0:
        monkeypatch.setattr(files, "flush", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        try:
            prepared(file)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    cache = file.parent / "cache/grpo_math"
    assert {path.suffix for path in cache.iterdir()} == {".part", ".lock"}
    assert len(prepared(file)) == N
    assert {path.suffix for path in cache.iterdir()} == {".arrow", ".lock"}


@pytest.mark.parametrize("reason", ["File too large", "File exists", "Not a directory"])
def test_without_a_folder_to_write_to_the_problems_are_in_memory(file, reason, capsys, caplog, size_limit):  # noqa: F811
    expected = load_problems(str(file), skip_bad_rows=True, template="direct")
    warnings = caplog.messages[:]
    cache = file.parent / "cache/grpo_math"
    if reason == "File too large":
        size_limit(100_000)
    else:
        in_the_way = cache if reason == "File exists" else cache.parent
        in_the_way.parent.mkdir(exist_ok=True)
        in_the_way.touch()
    table = prepared(file)
    size_limit(2**40)
    line = f"the problems of {file} are prepared in memory: {cache} cannot be written ({reason})\n"
    assert capsys.readouterr().err.endswith(line)
    assert table.cache_files == []
    assert table.to_list() == hub_datasets.Dataset.from_list(expected).to_list()
    assert caplog.messages == 2 * warnings
    assert not [*file.parent.glob("cache/**/*.part")]


def test_a_process_waits_for_the_one_that_prepares(file, monkeypatch):
    read_table = datasets.read_table

    def read_while_another_starts(*words):
        nonlocal child
        # Only the first process reads.
        monkeypatch.setattr(datasets, "read_table", lambda *_: os._exit(1))
        if (child := os.fork()) == 0:
            os._exit(int(len(prepared(file)) != N))
        return read_table(*words)

    child = 0
    monkeypatch.setattr(datasets, "read_table", read_while_another_starts)
    assert len(prepared(file)) == N
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("disk", ["free", "full"])
def test_rows_that_are_not_in_memory_can_be_read_several_times_at_once(disk, size_limit, caplog):  # noqa: F811
    n = stored.IN_MEMORY + 5 * stored.BATCH + 1
    size_limit(30_000 if disk == "full" else 2**40)
    rows = Stored({"id": number} for number in range(n))
    size_limit(2**40)
    assert len(rows) == n
    for one, other in zip(rows, rows, strict=True):
        assert one == other
    assert [row["id"] for row in rows] == [*range(n)]
    assert len(caplog.messages) == (disk == "full")


def test_a_bar_is_for_many_rows_on_the_main_process(monkeypatch):
    rows = [1, 2]
    assert [isinstance(stored.bar(rows, "reading", total), Bar) for total in (2, stored.IN_MEMORY + 1)] == [False, True]
    monkeypatch.setenv("RANK", "1")
    assert stored.bar(rows, "reading", is_large=True) is rows


@pytest.mark.slow
def test_a_recipe_trains_on_the_same_problems_of_a_table_and_of_a_list(file, monkeypatch):
    def problems():
        words = ["--dataset", str(file), "--output_dir", "run", "--skip_bad_rows", "--prompt_template", "xml"]
        return RecipeProblems(read(words).raise_first_problem().settings)

    tables = [problems(), problems()]  # the second gets what the first has computed
    assert not any(isinstance(one.rows, list) for one in tables)
    monkeypatch.setattr(datasets, "LARGE", 2**40)
    listed = problems()
    for one in tables:
        assert [*one.rows["id"]] == [row["id"] for row in listed.rows]
        for name in ("sample", "first"):
            ours, theirs = getattr(one, name)(300), getattr(listed, name)(300)
            assert [row["prompt"] for row in ours] == [row["prompt"] for row in theirs]
        assert one.evaluation.before_and_after.rows[0]["prompt"] == listed.evaluation.before_and_after.rows[0]["prompt"]
        assert (one.hashes, one.overlap) == (listed.hashes, listed.overlap)

"""data.py: the real data sets, files with bad rows, the Hub (as a stand-in), and the generated problems."""

import json
import os
from collections import Counter
from pathlib import Path

import datasets as hub_datasets
import pytest

from grpo_math.errors import ConfigError, DataError
from grpo_math.problems import datasets
from grpo_math.problems.datasets import ACCEPTED, load_problems, to_dataset
from grpo_math.problems.prompts import TEMPLATES
from grpo_math.problems.rows import gsm8k_gold

FOLDER = os.environ.get("GRPO_MATH_DATA")
needs_data = pytest.mark.skipif(not FOLDER, reason="GRPO_MATH_DATA names no folder with gsm8k, math and math500")
COMMON = ["id", "prompt", "problem", "answer", "answer_format"]
GOOD = {"problem": "What is 3 + 4?", "answer": "7"}


def write(path: Path, *rows: object) -> str:
    """A JSONL file; a row given as text or bytes is written as it is."""
    lines = [
        row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode() for row in rows
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)


# The real data


@needs_data
@pytest.mark.parametrize(
    ("dataset", "split", "rows"),
    [
        ("gsm8k", "train", 7473),
        ("gsm8k", "test", 1319),
        ("math", "train", 7498),
        ("math", "test", 4500),
        ("math500", "test", 500),
    ],
)
def test_the_published_sets_have_their_rows_and_every_row_has_a_gold(dataset, split, rows):
    loaded = load_problems(dataset, split)
    assert len(loaded) == rows
    assert len({row["id"] for row in loaded}) == rows
    keys = COMMON if dataset == "gsm8k" else [*COMMON, "level", "subject"]
    for row in loaded:
        assert list(row) == keys
        assert row["answer"] == row["answer"].strip() != ""
        assert row["problem"].strip()
        assert row["prompt"][-1] == {"role": "user", "content": row["problem"]}


@pytest.mark.slow
@needs_data
def test_the_gold_of_the_last_box_is_the_answer_field_of_every_row(tmp_path):
    # What the solutions box, against the answers that a separate program cut out of them.
    for name, split, gaps in (("math", "train", 2), ("math", "test", 0), ("math500", "test", 0)):
        file = datasets.SOURCES[name].files[split]
        rows = [json.loads(line) for line in (Path(FOLDER or "") / file).read_text(encoding="utf-8").splitlines()]
        without = [{key: row[key] for key in row if key != "answer"} for row in rows]
        folder = tmp_path / name / split
        (folder / file).parent.mkdir(parents=True)
        write(folder / file, *without)
        loaded = load_problems(name, split, data_dir=str(folder))
        assert len(loaded) == len(rows) - gaps
        answers = {row["unique_id"]: row["answer"] for row in rows}
        # The box as written: the punctuation and the spaces at its edges may go.
        assert [row["answer"].strip(" .,") for row in loaded] == [answers[row["id"]].strip(" \n.,") for row in loaded]


@needs_data
def test_a_limit_draws_rows_by_the_seed_and_keeps_the_order_of_the_file():
    all_ids = [row["id"] for row in load_problems("math500", "test")]
    settings = ({"limit": 100}, {"limit": 100}, {"limit": 100, "seed": 1}, {"limit": 40}, {"limit": 9999})
    first, again, other, smaller, whole_set = (
        [row["id"] for row in load_problems("math500", "test", **one)] for one in settings
    )
    assert first == again != other
    assert first == [i for i in all_ids if i in set(first)]
    assert len(first) == 100
    assert set(smaller) < set(first)
    assert whole_set == all_ids


@needs_data
def test_heldout_means_test():
    assert load_problems("gsm8k", "heldout", limit=3) == load_problems("gsm8k", "test", limit=3)
    with pytest.raises(ConfigError, match=r"split='tset' is not known: did you mean 'test'\? \(train, test\)"):
        load_problems("gsm8k", "tset")


# A file of the user


def test_a_file_may_use_any_of_the_key_names(tmp_path):
    file = write(
        tmp_path / "mine.jsonl",
        {"problem": "a?", "answer": "1"},
        {"question": "b?", "solution": r"so $\boxed{\frac{1}{2}}$"},
        {"prompt": "c?", "gold": 3},
        {"question": "d?", "answer": "1 + 1 = 2\n#### 2,000"},
        {"problem": "e?", "answer": 2.5, "solution": "ignored, since there is an answer"},
        {"problem": " f? ", "answer": None, "gold": " x + 1 ", "id": 9},
        {"problem": "g?", "answer": r"first \boxed{1}, then \boxed{\sqrt{2}}", "id": "seven"},
        {"problem": "h?", "answer": "1,080", "unique_id": "u/8"},
    )
    rows = load_problems(file)
    assert [row["answer"] for row in rows] == ["1", r"\frac{1}{2}", "3", "2000", "2.5", "x + 1", r"\sqrt{2}", "1,080"]
    assert [row["id"] for row in rows] == ["mine/1", "mine/2", "mine/3", "mine/4", "mine/5", "9", "seven", "u/8"]
    assert rows[5]["problem"] == "f?"
    assert all(list(row) == [*COMMON, "question", "solution", "unique_id"] for row in rows)  # gold is partly a number


def test_the_other_columns_of_a_file_are_kept_as_they_are_in_every_row(tmp_path, caplog):
    first = {"prompt": [{"role": "user", "content": "a?"}], "solution": r"so $\boxed{5}$", "source": "mine", "ease": 1}
    second = {"prompt": [{"role": "user", "content": "b?"}], "solution": "6", "steps": ["x", "y"], "meta": {"year": 7}}
    for position in (tmp_path / "mine.jsonl", tmp_path / "folder/train.jsonl"):
        position.parent.mkdir(exist_ok=True)
        file = write(position, first, second)
        rows = load_problems(str(position.parent) if position.parent.name == "folder" else file)
        assert [row["answer"] for row in rows] == ["5", "6"]
        for row, given in zip(rows, (first, second), strict=True):
            kept = {name: row[name] for name in ("solution", "source", "ease", "steps", "meta")}
            assert kept == {**dict.fromkeys(kept), **{name: given[name] for name in kept if name in given}}
        assert to_dataset(rows)[0]["solution"] == first["solution"]
    assert not caplog.records
    nested = write(tmp_path / "nested.jsonl", {"prompt": {"text": "a?"}, "answer": "5"})
    assert list(load_problems(nested, columns="problem=prompt.text")[0]) == COMMON
    mixed = write(tmp_path / "mixed.jsonl", {**GOOD, "source": "mine"}, {**GOOD, "source": 3})
    assert [list(row) for row in load_problems(mixed)] == [COMMON, COMMON]
    assert "the column 'source' of" in caplog.text


@pytest.mark.parametrize("name", ["prompt", "grade"])
def test_a_column_with_a_name_that_training_uses_is_left_out_with_a_warning(name, tmp_path, caplog):
    file = write(tmp_path / "mine.jsonl", {**GOOD, name: "x", "source": "mine"})
    assert [list(row) for row in load_problems(file)] == [[*COMMON, "source"]]
    reason = "is left out, no reward gets it: training uses this name itself"
    assert caplog.messages == [f"the column {name!r} of {file} {reason}"]


def test_all_rows_have_level_and_subject_as_soon_as_one_has(tmp_path):
    file = write(
        tmp_path / "l.jsonl",
        GOOD,
        {**GOOD, "level": "Level 3", "subject": "Algebra"},
        {**GOOD, "level": 5},
        {**GOOD, "level": "Level ?"},
    )
    rows = load_problems(file)
    assert [row["level"] for row in rows] == [None, 3, 5, None]
    assert [row["subject"] for row in rows] == [None, "Algebra", None, None]
    odd = write(tmp_path / "o.jsonl", {**GOOD, "level": [3], "subject": 3}, {**GOOD, "level": "hard"})
    assert [(row["level"], "subject" in row) for row in load_problems(odd)] == [(None, False), ("hard", False)]


def test_blank_lines_a_byte_order_mark_and_windows_line_ends_are_no_fault(tmp_path):
    line = json.dumps(GOOD).encode()
    file = write(tmp_path / "w.jsonl", b"\xef\xbb\xbf" + line + b"\r", b"", b"  \r", line)
    assert [row["id"] for row in load_problems(file)] == ["w/1", "w/4"]


BAD_ROWS = {
    "no gold": ({"problem": "a?"}, "answer is missing"),
    "an empty gold": ({"problem": "a?", "answer": " "}, "answer is empty"),
    "an empty gold is not made up for by the solution": (
        {"problem": "a?", "answer": "", "solution": r"\boxed{5}"},
        "answer is empty",
    ),
    "an empty marker": ({"problem": "a?", "answer": "work\n####  "}, "answer contains no gold answer"),
    "a gold of the wrong type": ({"problem": "a?", "answer": ["7"]}, "answer is of type list, not text or a number"),
    "a missing gold as pandas writes it": ('{"problem": "a?", "answer": NaN}', "answer contains no gold answer"),
    "no problem": ({"answer": "7"}, "problem is missing"),
    "a problem of the wrong type": ({"problem": 5, "answer": "7"}, "problem is of type int, not text"),
    "a prompt of messages": ({"prompt": [{"role": "user"}], "answer": "7"}, "prompt is of type list, not text"),
    "not JSON": ("{'problem': 1}", "row cannot be read (JSONDecodeError: Expecting property name enclosed"),
    "not an object": ([1, 2], "row is of type list, not an object"),
    "not UTF-8": (b'{"problem": "caf\xe9?", "answer": "7"}', "row cannot be read (UnicodeDecodeError: "),
    "nested without end": ("[" * 100_000, "row cannot be read (RecursionError: "),
}


@pytest.mark.parametrize("fault", BAD_ROWS)
def test_a_bad_row_is_named_by_file_line_and_field(tmp_path, caplog, fault):
    row, reason = BAD_ROWS[fault]
    file = write(tmp_path / "bad.jsonl", {**GOOD, "id": "first"}, "", row, GOOD)
    with pytest.raises(DataError) as error:
        load_problems(file)
    assert str(error.value).startswith(f"{file}:3: {reason}")
    assert str(error.value).endswith("correct the row, or pass --skip_bad_rows")
    assert len(str(error.value)) < 400 + len(file)

    assert [row["id"] for row in load_problems(file, skip_bad_rows=True)] == ["first", "bad/4"]
    (message,) = caplog.messages
    assert message.startswith(f"skipped 1 of 3 rows of {file}; line 3: {reason}")


def test_a_file_without_a_good_row_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="has no rows"):
        load_problems(write(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match=r"none\.jsonl:1: answer is missing"):
        load_problems(write(tmp_path / "none.jsonl", {"problem": "a?"}), skip_bad_rows=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": "gms8k"}, f"dataset='gms8k' is not known: did you mean 'gsm8k'? ({', '.join(ACCEPTED)})"),
        ({"dataset": "imo"}, f"dataset='imo' is not known: use one of {', '.join(ACCEPTED)}"),
        (
            {"dataset": "generated:sum"},
            "level='sum' is not known: did you mean 'sums'? (sums, differences, products, long_products)",
        ),
        ({"dataset": "generated", "split": "dev"}, "split='dev' is not known: use one of train, heldout"),
        (
            {"dataset": "generated", "template": "bxed"},
            f"template='bxed' is not known: did you mean 'boxed'? ({', '.join(TEMPLATES)}, as_is)",
        ),
        (
            {"dataset": "gsm8k", "template": "bxed"},
            f"template='bxed' is not known: did you mean 'boxed'? ({', '.join(TEMPLATES)}, as_is)",
        ),
        (
            {"dataset": "gsm8k", "limit": 0},
            "limit=0 is not a number of rows: give 1 or more, or leave it out for all rows",
        ),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest_right_one(arguments, message):
    with pytest.raises(ConfigError) as error:
        load_problems(**arguments)
    assert str(error.value) == message


# The Hub


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the Hub: {(id, split): rows}; every load is noted."""
    stored: dict = {"loads": []}

    def load_dataset(name, config, split, revision):
        if not any(key[0] == name for key in stored if isinstance(key, tuple)):
            raise OSError("[Errno -2] Name or service not known\nand more lines")
        stored["loads"].append((name, config, split, revision))
        return hub_datasets.Dataset.from_list(stored[name, split])

    monkeypatch.delenv("GRPO_MATH_DATA", raising=False)
    monkeypatch.setattr(hub_datasets, "get_dataset_split_names", lambda *path, revision: ["train", "test"])
    monkeypatch.setattr(hub_datasets, "load_dataset", load_dataset)
    return stored


def test_without_local_data_the_hub_is_asked_with_configuration_and_revision(hub):
    hub["openai/gsm8k", "train"] = [{"question": "a?", "answer": "2 * 600 = 1200\n#### 1,200"}]
    hub["owner/name", "test"] = [{"query": "b?", "answer": "1"}]
    hub["open-r1/OpenR1-Math-220k", "train"] = [{"problem": "c?", "answer": "2"}]
    loaded = [
        load_problems(*name) for name in (["gsm8k"], ["owner/name:extra@1a2b", "heldout"], ["openr1:extended@v2"])
    ]
    results = [(row["id"], row["problem"], row["answer"]) for (row,) in loaded]
    assert results == [("gsm8k/train/1", "a?", "1200"), ("name/1", "b?", "1"), ("openr1/train/1", "c?", "2")]
    assert hub["loads"] == [
        ("openai/gsm8k", "main", "train", None),
        ("owner/name", "extra", "test", "1a2b"),
        ("open-r1/OpenR1-Math-220k", "extended", "train", "v2"),
    ]


@pytest.mark.parametrize("folder", [None, "empty"])
def test_with_neither_local_data_nor_the_hub_one_line_says_what_to_do(hub, monkeypatch, tmp_path, folder):
    if folder:
        monkeypatch.setenv("GRPO_MATH_DATA", str(tmp_path / folder))
    with pytest.raises(ConfigError) as error:
        load_problems("gsm8k", "test")
    assert str(error.value) == (
        "dataset='gsm8k' is not in a local folder, and openai/gsm8k cannot be had from the Hub "
        "(OSError: [Errno -2] Name or service not known): "
        "set GRPO_MATH_DATA to a folder that holds gsm8k/test.jsonl, or pass --dataset generated"
    )
    assert hub["loads"] == []


def test_math_on_the_hub_names_its_columns_otherwise(hub):
    row = {"problem": "a?", "level": "Level 5", "type": "Algebra", "solution": r"so $\boxed{1}$"}
    hub[datasets.SOURCES["math"].hub, "train"] = [row]
    (results,) = load_problems("math")
    assert (results["answer"], results["level"], results["subject"]) == ("1", 5, "Algebra")


# Generated problems


def test_generated_problems_come_by_level_and_split_and_need_no_data(monkeypatch):
    monkeypatch.delenv("GRPO_MATH_DATA", raising=False)
    rows = load_problems("generated", "heldout", limit=256)
    assert len(rows) == 256
    assert list(rows[0]) == [*COMMON, "level"]
    assert {row["level"] for row in rows} == {1, 2}
    assert load_problems("generated", "test", limit=256) == rows
    assert load_problems("generated:sums,differences", "heldout", limit=256) == rows
    assert {row["level"] for row in load_problems("generated:products, long_products", limit=20)} == {3, 4}
    assert load_problems("generated", limit=50, seed=1) != load_problems("generated", limit=50)
    assert Counter(row["level"] for row in load_problems("generated")) == {1: 312, 2: 312}
    assert len(load_problems("generated", "heldout", limit=320)) == 306  # all that there are


# What comes out


@pytest.mark.parametrize(
    ("solution", "gold"),
    [
        ("#### 72", "72"),
        ("a\n#### 1,234,567\n", "1234567"),
        ("#### -5", "-5"),
        ("#### 3 \n later #### 4", "4"),
        ("#### 1,23", "1,23"),  # no thousands separator
        ("####", ""),
        ("72", None),
    ],
)
def test_a_gsm8k_gold_is_what_stands_after_the_last_marker(solution, gold):
    assert gsm8k_gold(solution) == gold

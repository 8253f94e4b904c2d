"""Rows of files of five formats, of the Hub (a stand-in) and of generated problems: what is kept, drawn and refused."""

import bz2
import csv
import gzip
import json
import lzma
import re
import sys
from collections import Counter
from decimal import Decimal
from hashlib import sha256
from pathlib import Path
from string import ascii_lowercase

import datasets as hub_datasets
import numpy
import pyarrow
import pytest
from pyarrow.feather import write_feather
from pyarrow.parquet import write_table

from grpo_math.errors import ConfigError, DataError, UserError
from grpo_math.problems.datasets import ACCEPTED, load_problems
from grpo_math.problems.from_recipe import RecipeProblems
from grpo_math.problems.generated import LEVELS, SPLITS, generate, problems
from grpo_math.problems.prompts import TEMPLATES
from grpo_math.problems.sources import SOURCES
from grpo_math.rewards.inputs import GRADE
from grpo_math.settings.data import columns_as_text
from grpo_math.settings.recipe import read

COMMON = ["id", "prompt", "problem", "answer", "answer_format"]
GOOD = {"problem": "What is 3 + 4?", "answer": "7"}


def write(path: Path, *rows: object) -> str:
    """A JSONL file; a row given as text or bytes is written as it is."""
    lines = [
        row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode() for row in rows
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)


def values(rows, *names):
    return [tuple(row.get(name) for name in names) for row in rows]


# The real data


@pytest.mark.parametrize(
    ("dataset", "split", "n"),
    [
        ("gsm8k", "train", 7473),
        ("gsm8k", "test", 1319),
        ("math", "train", 7498),
        ("math", "test", 4500),
        ("math500", "test", 500),
    ],
)
def test_the_published_sets_have_their_rows_and_every_row_has_a_gold(data_dir, dataset, split, n):
    rows = load_problems(dataset, split)
    assert len({row["id"] for row in rows}) == len(rows) == n
    keys = COMMON if dataset == "gsm8k" else [*COMMON, "level", "subject"]
    for row in rows:
        assert list(row) == keys
        assert row["answer"] == row["answer"].strip() != ""


# A file of the user


def test_a_file_may_use_any_of_the_key_names(tmp_path):
    rows = [
        ({"problem": "a?", "answer": "1"}, "1"),
        ({"question": "b?", "solution": r"so $\boxed{\frac{1}{2}}$"}, r"\frac{1}{2}"),
        ({"prompt": "c?", "gold": 3}, "3"),
        ({"question": "d?", "answer": "1 + 1 = 2\n#### 2,000"}, "2000"),
        ({"problem": "e?", "answer": 2.5, "solution": "ignored, since there is an answer"}, "2.5"),
        ({"problem": "f?", "answer": None, "gold": " x + 1 "}, "x + 1"),
        ({"problem": "g?", "answer": r"first \boxed{1}, then \boxed{\sqrt{2}}"}, r"\sqrt{2}"),
        ({"problem": "h?", "reward_model": {"ground_truth": "1,080"}}, "1,080"),
        ({"problem": "i?", "answer": "#### 3 \n later #### -1,234,567\n"}, "-1234567"),
        ({"problem": "j?", "answer": "#### 1,23"}, "1,23"),  # no thousands separator
        ({"problem": "k?", "solution": "x" * 160}, "x" * 160),
        ({"problem": " ", "Question": "l?", "answer": "", "Solution": r"\boxed{5}"}, "5"),
        ({"instruction": "m?", "input": "", "answer": '["7"]'}, "7"),
        ({"instruction": "n?", "input": None, "answer": ["3", 5]}, "3, 5"),
        ({"problem": "o?", "ground_truth": "['7']"}, "7"),
        ({"problem": "p?", "Answer": r'["\\frac{3}{4}"]'}, r"\frac{3}{4}"),
        ({"problem": "q?", "answer": "[3, 5]"}, "[3, 5]"),  # an interval
        # As the grader finds the answer of a solution.
        ({"problem": "r?", "answer": "12 * 6\n####\n72"}, "72"),
        ({"problem": "s?", "answer": "12 * 6 <answer>72</answer>"}, "72"),
        ({"problem": "t?", "answer": r"\fbox{72}"}, "72"),
        # Commas between the ends of an interval and the parts of a point, not between thousands.
        ({"problem": "u?", "answer": "#### [0,100]"}, "[0,100]"),
        ({"problem": "v?", "answer": "#### (3,100)"}, "(3,100)"),
        ({"problem": "w?", "answer": "#### 0.5,100"}, "0.5,100"),
        ({"problem": "x?", "answer": "\frac{1}{2}"}, "\frac{1}{2}"),  # a form feed: the checks report it
        ({"problem": "y?", "answer": [0.75, "3/4", r"\frac{3}{4}"]}, "0.75"),  # one value
        ({"problem": "z?", "answer": "['18', '18']"}, "18"),
    ]
    loaded = load_problems(write(tmp_path / "mine.jsonl", *(row for row, _ in rows)))
    assert values(loaded, "id", "problem", "answer") == [
        (f"mine/{i}", f"{letter}?", gold)
        for i, (letter, (_, gold)) in enumerate(zip(ascii_lowercase, rows, strict=False), 1)
    ]


def test_a_row_keeps_its_id_level_subject_and_other_columns_and_all_rows_have_the_same_keys(tmp_path, caplog):
    rows = [
        {"question": " a? ", "answer": "5", "source": "mine", "steps": ["x"], "id": 9},
        {"question": "b?", "answer": "6", "level": "Level 3", "subject": "Algebra", "unique_id": "u/8"},
        {"question": "c?", "answer": "7", "level": 5, "subject": 3, "id": "u/8"},
        {"question": "d?", "answer": "8", "level": "Level ?"},
        {"question": "e?", "answer": "9", "tolerance": 1},
    ]
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "train.jsonl", *rows)
    for dataset in (write(tmp_path / "mine.jsonl", *rows), str(tmp_path / "folder")):
        loaded = load_problems(dataset)
        name = Path(dataset).stem
        assert values(loaded, "id", "problem", "level", "subject", "source", "steps", "tolerance") == [
            ("9", "a?", None, None, "mine", ["x"], None),
            ("u/8", "b?", 3, "Algebra", None, None, None),
            (f"{name}/3", "c?", 5, None, None, None, None),  # the id occurs before
            (f"{name}/4", "d?", None, None, None, None, None),
            (f"{name}/5", "e?", None, None, None, None, None),
        ]
        assert loaded[0]["prompt"][-1] == {"role": "user", "content": "a?"}
        assert len({tuple(row) for row in loaded}) == 1
    assert not caplog.records


def test_a_column_that_training_uses_or_that_has_several_types_is_left_out_with_a_warning(tmp_path, caplog):
    made = ("completions", "images", GRADE)
    rows = ({**GOOD, name: "x", "note": "mine", "kind": kind} for name, kind in zip(made, (1, "a", "b"), strict=True))
    file = write(tmp_path / "mine.jsonl", *rows)
    assert [list(row) for row in load_problems(file)] == [[*COMMON, "note"]] * 3
    reasons = dict.fromkeys(made, "training uses this name itself")
    reasons["kind"] = "Could not convert 'a' with type str: tried to convert to int64"
    warnings = [f"the column {name!r} of {file} is left out, no reward gets it: {reasons[name]}" for name in reasons]
    assert sorted(caplog.messages) == sorted(warnings)
    caplog.clear()
    file = write(tmp_path / "nested.jsonl", {"prompt": {"text": "a?"}, "answer": "5"})
    (row,) = load_problems(file, columns="problem=prompt.text")
    assert (list(row), row["problem"], caplog.messages) == (COMMON, "a?", [])


BAD_ROWS = {
    "no gold": ({"problem": "a?"}, "answer is missing: its columns are problem; accepted are answer, gold, "),
    "an empty gold": ({"problem": "a?", "answer": " "}, "answer is empty: correct"),
    "an empty marker": ({"problem": "a?", "answer": "work\n####  "}, "answer contains no gold answer"),
    "prose": ({"problem": "a?", "solution": "First\nthen"}, "solution contains no gold answer"),
    "long prose": ({"problem": "a?", "solution": "x" * 161}, "solution contains no gold answer"),
    "a gold of the wrong type": ({"problem": "a?", "answer": [["7"]]}, "answer is of type list, not text or a number"),
    "a truth value": ({"problem": "a?", "answer": True}, "answer is of type bool, not text or a number"),
    "None as text": ({"problem": "a?", "answer": "None"}, "answer contains no gold answer"),
    "a placeholder": ({"problem": "a?", "answer": "N/A"}, "answer contains no gold answer"),
    "a number that no float holds": ('{"problem": "a?", "answer": 1e400}', "answer contains no gold answer"),
    "a missing gold as pandas writes it": ('{"problem": "a?", "answer": NaN}', "answer contains no gold answer"),
    "no problem": ({"answer": "7"}, "problem is missing: its columns are answer; accepted are problem, question, "),
    "an empty problem": ({"problem": " ", "answer": "7"}, "problem is empty"),
    "a problem of the wrong type": ({"problem": 5, "answer": "7"}, "problem is of type int, not text"),
    "a prompt of messages": ({"prompt": [{"role": "user"}], "answer": "7"}, "prompt is of type list, not text"),
    "an error of a spreadsheet": ({"problem": "a?", "answer": "#REF!"}, "answer contains no gold answer"),
    "null": ({"problem": "a?", "answer": None, "target": None}, "answer is null: correct"),
    "not JSON": ("{'problem': 1}", "row cannot be read (JSONDecodeError: Expecting property name enclosed"),
    "not an object": ([1, 2], "row is of type list, not an object"),
    "not UTF-8": (b'{"problem": "caf\xe9?", "answer": "7"}', "row cannot be read (UnicodeDecodeError: "),
    "half a character": ('{"problem": "2 + 2?", "answer": "4", "note": "\\ud83d"}', "row contains half a character"),
    "nested without end": ("[" * 100_000, "row cannot be read (RecursionError: "),
}


@pytest.mark.parametrize("fault", BAD_ROWS)
def test_a_bad_row_is_named_by_file_line_and_field(tmp_path, caplog, fault):
    row, reason = BAD_ROWS[fault]
    file = write(tmp_path / "bad.jsonl", b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r", "  \r", row, GOOD)
    with pytest.raises(DataError) as error:
        load_problems(file)
    assert str(error.value).startswith(f"{file}:3: {reason}")
    assert str(error.value).endswith("correct the row, or pass --skip_bad_rows")
    assert len(str(error.value)) < 450 + len(file)
    assert values(load_problems(file, skip_bad_rows=True), "id") == [("bad/1",), ("bad/4",)]
    (message,) = caplog.messages
    assert message.startswith(f"skipped 1 of 3 rows of {file}; line 3: {reason.partition(':')[0]}")


def test_a_fault_of_several_rows_is_counted(tmp_path):
    rows = [GOOD, *[GOOD | {"answer": None}] * 2, GOOD | {"answer": " "}]
    with pytest.raises(DataError, match=r"a\.jsonl:2: answer is null in 2 of 4 rows: correct the row, or pass"):
        load_problems(write(tmp_path / "a.jsonl", *rows))


@pytest.mark.parametrize(
    ("rows", "message"), [([], "has no rows"), ([{"problem": "a?"}], "jsonl:1: answer is missing")]
)
def test_a_file_without_a_good_row_is_an_error(tmp_path, rows, message):
    with pytest.raises(UserError, match=message):
        load_problems(write(tmp_path / "none.jsonl", *rows), skip_bad_rows=True)


def test_a_limit_draws_rows_by_the_seed_and_a_larger_one_contains_them_in_the_order_of_the_file(tmp_path):
    file = write(tmp_path / "a.jsonl", *({"problem": f"{i}?", "answer": i, "id": i} for i in range(50)))
    one, ten, forty, more = ([int(row["id"]) for row in load_problems(file, limit=n)] for n in (1, 10, 40, 99))
    assert set(one) < set(ten) < set(forty) < set(more)
    assert [len(one), ten, forty, more] == [1, sorted(ten), sorted(forty), list(range(50))]
    assert [row["id"] for row in load_problems(file, limit=10, seed=1)] != ten


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": "gms8k"}, f"dataset='gms8k' is not known: did you mean 'gsm8k'? ({', '.join(ACCEPTED)})"),
        *(
            ({"dataset": path}, f"dataset={path!r} is not a file, a folder or an id on the Hub: check the path")
            for path in ("./nowhere", "/no/where", "a/b/c")
        ),
        (
            {"dataset": "generated:sum"},
            "level='sum' is not known: did you mean 'sums'? (sums, differences, products, long_products)",
        ),
        ({"dataset": "generated", "split": "dev"}, "split='dev' is not known: use one of train, heldout"),
        ({"dataset": "gsm8k", "split": "tset"}, "split='tset' is not known: did you mean 'test'? (train, test)"),
        (
            {"dataset": "gsm8k", "template": "bxed"},
            f"template='bxed' is not known: did you mean 'boxed'? ({', '.join(TEMPLATES)}, as_is)",
        ),
        (
            {"dataset": "gsm8k", "limit": 0},
            "limit=0 is not a number of rows: give 1 or more, or leave it out for all rows",
        ),
        *(
            (
                {"dataset": "gsm8k", "columns": f"problem=a,{part}"},
                f"columns='problem=a,{part}' does not name a field and its one column in {part!r}: "
                "write problem=query,answer=target; the fields are problem, answer, id, level, subject",
            )
            for part in ("answer", "gold=b", "problem=b")
        ),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest_right_one(arguments, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        load_problems(**arguments)


# The Hub


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the Hub: {(id, split): rows}; every load is noted."""
    stored: dict = {"loads": []}

    def load_dataset(name, config, split, revision):
        if (name, split) not in stored:
            raise OSError("[Errno -2] Name or service not known\nand more lines")
        stored["loads"].append((name, config, split, revision))
        return hub_datasets.Dataset.from_list(stored[name, split])

    monkeypatch.delenv("GRPO_MATH_DATA", raising=False)
    monkeypatch.setattr(hub_datasets, "get_dataset_split_names", lambda *path, revision: ["train", "test"])
    monkeypatch.setattr(hub_datasets, "load_dataset", load_dataset)
    return stored


def test_without_local_data_the_hub_is_asked_with_configuration_and_revision(hub, tmp_path, monkeypatch):
    hub["openai/gsm8k", "train[:1]"] = [{"question": "a?", "answer": "2 * 600 = 1200\n#### 1,200"}]
    hub["owner/name", "test"] = [{"query": "b?", "answer": "1", "big": "x"}]
    hub["open-r1/OpenR1-Math-220k", "train"] = [{"problem": "c?", "answer": "2"}]
    monkeypatch.setenv("GRPO_MATH_DATA", str(tmp_path))
    (tmp_path / "openr1").mkdir()
    loaded = [
        *load_problems("gsm8k", "train[:1]"),
        *load_problems("owner/name:extra@1a2b", "heldout"),
        *load_problems("openr1:extended@v2"),
    ]
    assert values(loaded, "id", "problem", "answer", "big") == [
        ("gsm8k/train/1", "a?", "1200", None),
        ("name/1", "b?", "1", None),
        ("openr1/train/1", "c?", "2", None),
    ]
    assert hub["loads"] == [
        ("openai/gsm8k", "main", "train[:1]", None),
        ("owner/name", "extra", "test", "1a2b"),
        ("open-r1/OpenR1-Math-220k", "extended", "train", "v2"),
    ]
    hub["owner/name", "test"] = [{"problem": "b?", "answer": " "}]
    with pytest.raises(DataError, match=r"^owner/name \(test\):1: answer is empty"):
        load_problems("owner/name", "test")


@pytest.mark.parametrize("folder", ["", "/empty"])
def test_with_neither_local_data_nor_the_hub_one_line_says_what_to_do(hub, monkeypatch, folder):
    monkeypatch.setenv("GRPO_MATH_DATA", folder)
    message = (
        "dataset='gsm8k' is not in a local folder, and openai/gsm8k cannot be loaded from the Hub "
        "(OSError: [Errno -2] Name or service not known): "
        "set GRPO_MATH_DATA to a folder that contains gsm8k/test.jsonl, or name another data set"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        load_problems("gsm8k", "test")


def test_math_on_the_hub_has_no_problem_of_math500_in_its_test_split(hub):
    rows = [{"problem": p, "level": "Level 5", "type": "Algebra", "solution": rf"so $\boxed{{{p}}}$"} for p in "abc"]
    hub[SOURCES["math"].hub, "test"] = rows
    hub["HuggingFaceH4/MATH-500", "test"] = [{"problem": "b", "answer": "b"}]
    assert values(load_problems("math", "test"), "id", "answer", "level", "subject") == [
        ("math/test/1", "a", 5, "Algebra"),
        ("math/test/3", "c", 5, "Algebra"),
    ]
    hub[SOURCES["math"].hub, "train"] = [
        {"problem": "Let $\\boxed{N}$ mean the number of whole number divisors of N", "solution": r"\boxed{N}"}
    ]
    assert load_problems("math")[0]["answer"] == "6"


# Generated problems


def test_generated_problems_come_by_level_and_split_and_need_no_data(monkeypatch):
    monkeypatch.delenv("GRPO_MATH_DATA", raising=False)
    rows = load_problems("generated", "heldout", limit=256)
    assert list(rows[0]) == [*COMMON, "level"]
    assert load_problems("generated:sums,differences", "test", limit=256) == rows
    assert Counter(row["level"] for row in load_problems("generated:products, long_products", limit=5)) == {3: 3, 4: 2}
    assert load_problems("generated", limit=50, seed=1) != load_problems("generated", limit=50)
    assert Counter(row["level"] for row in load_problems("generated")) == {1: 312, 2: 312}
    assert len(load_problems("generated", "heldout", limit=320)) == 306  # all that there are


def test_the_same_seed_gives_the_same_bytes_on_every_platform():
    made = [generate(split, 200, seed, ("sums", "differences", "products")) for split in SPLITS for seed in (0, 7)]
    assert sha256(json.dumps(made).encode()).hexdigest() == (
        "8786bf0d644fcf90da74fb979db093ff3ac0d4907f3f30a35c77297ff7305b4e"
    )


@pytest.mark.parametrize("level", LEVELS)
def test_every_answer_is_right_and_no_arithmetic_is_in_both_splits(level):
    seen = {}
    for split in SPLITS:
        for p in generate(split, len(problems(level, split)), 0, (level,)):
            a, sign, b = re.fullmatch(r"What is (\d+) ([-+*]) (\d+)\?", p["problem"]).groups()
            assert int(p["answer"]) == {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] >= 0
            content = (a, b) if sign == "-" else tuple(sorted((a, b)))
            assert seen.setdefault(content, split) == split
    assert set(seen.values()) == set(SPLITS)


# Files of any format

ROWS = [{"problem": "What is 3 + 4?", "answer": "7"}, {"problem": "Wie viel, “genau”, ist 0,5 · 3?", "answer": "1.50"}]
JSONL = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
CSV = 'problem,answer,level\r\nWhat is 3 + 4?,7,\r\n"Wie viel, “genau”, ist 0,5 · 3?",1.50,2\r\n'
FILES = {
    "mine.jsonl": JSONL.encode(),
    "mine.json": json.dumps(ROWS, indent=2).encode(),
    "lines.json": JSONL.encode(),
    "mine.csv": CSV.encode(),
    "marked.csv": CSV.encode("utf-8-sig"),
    "semicolons.csv": "problem;answer\nWhat is 3 + 4?;7\nWie viel, “genau”, ist 0,5 · 3?;1.50\n".encode(),
    "mine.tsv": "problem\tanswer\nWhat is 3 + 4?\t7\nWie viel, “genau”, ist 0,5 · 3?\t1.50\n".encode(),
    "mine.jsonl.gz": gzip.compress(JSONL.encode()),
    "mine.csv.gz": gzip.compress(CSV.encode("utf-16")),
    "utf16.jsonl": JSONL.encode("utf-16"),
    "mine.jsonl.bz2": bz2.compress(JSONL.encode()),
    "mine.csv.xz": lzma.compress(CSV.encode()),
    "mine.jsonl.zst": pyarrow.compress(JSONL.encode(), "zstd", asbytes=True),
    "splits.json": json.dumps({"train": ROWS, "test": ROWS[:1]}).encode(),
    "separators.csv": f",,\r\n{CSV},,\r\n , ,\r\n,,,,\r\n".encode(),
    "surplus.csv": CSV.replace("4?,7,", "4?,7,,,").encode(),
    "data.json": json.dumps({"version": "1.0", "data": ROWS}, indent=2).encode(),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_any_format_has_the_same_rows(tmp_path, name):
    (tmp_path / name).write_bytes(FILES[name])
    rows = load_problems(str(tmp_path / name))
    assert [{"problem": row["problem"], "answer": row["answer"]} for row in rows] == ROWS
    assert [row["id"] for row in rows] == [f"{name.partition('.')[0]}/{row['id'].rpartition('/')[2]}" for row in rows]


@pytest.mark.parametrize(
    ("name", "content", "golds"),
    [
        (
            "mine.parquet",
            pyarrow.table(
                {
                    "prompt": [[{"role": "user", "content": row["problem"]}] for row in ROWS],
                    "answer": [Decimal("7.00"), Decimal("12345678901234567890.25")],
                }
            ),
            ["7.00", "12345678901234567890.25"],
        ),
        ("huge.jsonl", f'{{"problem": "10^400?", "answer": 1{"0" * 400}}}'.encode(), ["1" + "0" * 400]),
        ("long.csv", f"problem,answer\n{'x' * 200_000},7\n".encode(), ["7"]),
        ("commas.csv", b"problem,answer,,\nWhat?,7,,\n", ["7"]),
    ],
)
def test_a_number_of_any_kind_is_a_gold_answer_and_a_cell_may_have_any_length(tmp_path, name, content, golds):
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        write_table(content, tmp_path / name)
    assert [row["answer"] for row in load_problems(str(tmp_path / name))] == golds


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (
            "a.parquet",
            b"PAR1 and no more",
            "ArrowInvalid: Could not open Parquet input source '<Buffer>': Parquet magic bytes not found in footer",
        ),
        ("a.csv", b"problem,answer,answer\nWhat?,7,8\n", "ValueError: two columns are named 'answer')"),
        ("a.jsonl.gz", gzip.compress(b"x" * 1000, mtime=0)[:20], "EOFError: Compressed file ended before"),
        ("a.jsonl.zst", pyarrow.compress(JSONL.encode(), "zstd", asbytes=True)[:40], "OSError: Truncated compressed"),
        ("a.json", b'[{"problem": "a?",]', "JSONDecodeError: "),
        ("a.jsonl", None, "No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_reason_alone(tmp_path, capfd, name, content, reason):
    if content:
        (tmp_path / name).write_bytes(content)
    message = re.escape(f"{tmp_path / name} cannot be read ({reason}")
    with pytest.raises(UserError, match=rf"^{message}.*\Z"):  # the dot matches no line end
        load_problems(str(tmp_path / name))
    assert capfd.readouterr() == ("", "")


def test_the_lists_of_one_object_are_splits(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"dev": ROWS, "test": ROWS[:1]}))
    assert len(load_problems(str(tmp_path / "a.json"), "test")) == 1
    with pytest.raises(UserError, match=r"a\.json contains the lists dev, test: name one as the split"):
        load_problems(str(tmp_path / "a.json"))


def test_a_folder_of_save_to_disk_is_read(tmp_path):
    table = hub_datasets.Dataset.from_list(ROWS)
    table.save_to_disk(tmp_path / "one")
    hub_datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(tmp_path / "two")
    for split, ns in {"train": (2, 2), "train[1:]": (1, 1), "test": (None, 1)}.items():
        for name, n in zip(("one", "two"), ns, strict=True):
            if n:
                assert len(load_problems(str(tmp_path / name), split)) == n
            else:
                with pytest.raises(ConfigError, match="split='test' is not known: use one of train"):
                    load_problems(str(tmp_path / name), split)


def test_the_current_folder_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "train.jsonl", *ROWS)
    assert len(load_problems(".", "train")) == len(ROWS)


def test_columns_may_be_a_mapping(tmp_path):
    file = write(tmp_path / "a.jsonl", {"Question": "a?", "meta": {"gold": 7}})
    columns = {"problem": "Question", "answer": "meta.gold"}
    (row,) = load_problems(file, columns=columns)
    assert (row["problem"], row["answer"]) == ("a?", "7")
    (tmp_path / "recipe.yaml").write_text(json.dumps({"dataset": file, "columns": columns}))
    assert read(["--config", str(tmp_path / "recipe.yaml")]).raise_first_problem().settings.columns == columns_as_text(
        columns
    )


def test_a_missing_column_of_the_second_file_names_eval_columns(tmp_path):
    train, other = write(tmp_path / "a.jsonl", GOOD), write(tmp_path / "b.jsonl", {"problem": "a?", "gold_text": "7"})
    settings = read(["--dataset", train, "--eval_dataset", other, "--eval_n", "1"]).raise_first_problem().settings
    with pytest.raises(DataError, match=r"b\.jsonl:1: answer is missing: .* give --eval_columns answer=gold_text;"):
        RecipeProblems(settings).evaluation  # noqa: B018


@pytest.mark.parametrize(("name", "comma"), [("a.tsv", "\t"), ("a.csv", ",")])
def test_a_table_without_a_line_of_names_is_noticed(tmp_path, name, comma):
    (tmp_path / name).write_text(f"What is 3 + 4?{comma}7\nWhat is 1 + 1?{comma}2\n")
    reason = r"has no line of column names: its first line is 'What is 3 \+ 4\?, 7'"
    with pytest.raises(ConfigError, match=reason):
        load_problems(str(tmp_path / name))


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": 'It\'s "3 + 4". What is it?\n'}]
AS_TEXT = {
    "pandas": repr(CHAT),
    "JSON": json.dumps(CHAT, indent=1),
    "numpy": str(numpy.array(CHAT)),  # as to_csv of a Parquet file, and Dataset.to_csv, write it
}


@pytest.mark.parametrize("form", AS_TEXT)
def test_a_chat_that_a_table_stored_as_text_is_read_as_the_chat(tmp_path, form):
    gold = {"pandas": "{'ground_truth': '7'}", "JSON": '{"ground_truth": "7"}', "numpy": "{'ground_truth': '7'}"}[form]
    row = {"prompt": AS_TEXT[form], "reward_model": gold, "choices": "['7' '8']"}
    with open(tmp_path / "a.csv", "w", newline="") as file:
        table = csv.DictWriter(file, row)
        table.writeheader()
        table.writerow(row)
    (read,) = load_problems(str(tmp_path / "a.csv"), template="as_is")
    assert (read["prompt"], read["problem"]) == (CHAT, CHAT[1]["content"].strip() + "\n(A) 7\n(B) 8")
    (read,) = load_problems(str(tmp_path / "a.csv"))
    assert read["prompt"][-1] == {"role": "user", "content": read["problem"]}


def test_a_chat_as_text_that_cannot_be_read_is_a_bad_row(tmp_path):
    rows = [{"prompt": "[{'role': 'user', 'content': 'It's 3'}]", "answer": "7"}, {"prompt": "[3, 4] is?", "answer": 7}]
    file = write(tmp_path / "a.jsonl", *rows)
    with pytest.raises(
        DataError, match=r"a\.jsonl:1: prompt is a chat that a table stored as text, and that cannot be"
    ):
        load_problems(file)
    assert values(load_problems(file, skip_bad_rows=True), "problem") == [("[3, 4] is?",)]


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("cp1252", "Wie groß ist “x” bei 3 + 4 = x – 1?"),
        ("cp949", "사과 3개와 4개를 더하면?"),
        ("cp932", "りんごが３個と４個。全部でいくつ？"),
    ],
)
@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_a_file_of_excel_or_windows_is_read_in_its_encoding_with_a_note(tmp_path, caplog, encoding, text, name):
    line = f"problem,answer\n{text},8\n" if name == "a.csv" else f'{{"problem": "{text}", "answer": 8}}\n'
    (tmp_path / name).write_bytes(line.encode(encoding))
    assert [row["problem"] for row in load_problems(str(tmp_path / name))] == [text]
    assert len(caplog.messages) == 1
    assert f"{name} is not in UTF-8, and is read as {encoding}: " in caplog.text


@pytest.mark.parametrize(
    ("encoding", "text"), [("gbk", "小明有三个苹果"), ("cp1251", "Сколько"), ("big5", "小明有三個蘋果")]
)
def test_a_file_in_an_encoding_that_is_not_known_is_named(tmp_path, encoding, text):
    (tmp_path / "a.csv").write_bytes(f"problem,answer\n{text}?,7\n".encode(encoding))
    with pytest.raises(UserError, match=r"a\.csv cannot be read \(UnicodeDecodeError: .*\): save it in UTF-8$"):
        load_problems(str(tmp_path / "a.csv"), skip_bad_rows=True)


def test_a_quote_without_an_end_is_a_bad_row_and_the_rows_after_it_are_read(tmp_path, caplog):
    lines = [
        "problem,answer",
        "What is 1 + 1?,2",
        '"What is 2 + 2?,4',
        "",
        '"What is',
        '3 + 3?",6',
        'a "b" c?,7',
        '"d?,8',
    ]
    file = tmp_path / "a.csv"
    file.write_text("\n".join([*lines, "e?,9", "caf\xe9 größer,1", ""]))
    with pytest.raises(
        DataError, match=r"a\.csv:3: row cannot be read \(',' expected after '\"'\): correct the row, or"
    ):
        load_problems(str(file))
    rows = load_problems(str(file), skip_bad_rows=True)
    assert values(rows, "id", "answer") == [("a/2", "2"), ("a/6", "6"), ("a/7", "7"), ("a/9", "9"), ("a/10", "1")]
    assert "skipped 2 of 7 rows" in caplog.text
    # One damaged letter of UTF-8 is not another encoding.
    file.write_bytes(file.read_bytes().replace(b"e?,9", b"e\xff?,9"))
    assert "a/9" not in [row["id"] for row in load_problems(str(file), skip_bad_rows=True)]


@pytest.mark.parametrize("form", ["stream.arrow", "file.arrow", "a.feather"])
def test_the_remedy_for_an_arrow_file_makes_a_file_that_is_read(tmp_path, form):
    table, file = pyarrow.Table.from_pylist(ROWS), str(tmp_path / form)
    if form == "a.feather":
        write_feather(table, file)
    else:
        make = pyarrow.ipc.new_stream if form == "stream.arrow" else pyarrow.ipc.new_file
        with make(file, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(UserError, match=" is an Arrow file: ") as error:
        load_problems(file)
    exec(re.search(r'python -c "(.*)"$', str(error.value))[1], {})
    assert values(load_problems(f"{file}.jsonl"), "problem", "answer") == [
        (row["problem"], row["answer"]) for row in ROWS
    ]


def test_an_object_of_columns_is_named(tmp_path):
    chat = [{"role": "user", "content": "What is 3 + 4?"}]
    for columns in (
        {"problem": ["a?"], "answer": [7]},
        {"problem": {"0": "a?"}, "answer": {"0": "7"}},
        {"id1": ROWS[0]},
    ):
        file = write(tmp_path / "a.json", columns)
        with pytest.raises(
            UserError, match=r"a\.json is one object of columns: write one object per line, with pandas:"
        ):
            load_problems(file)
    cells = [[row["problem"], row["answer"]] for row in ROWS]
    for rows in (cells, {"columns": ["problem", "answer"], "index": [0, 1], "data": cells}):
        with pytest.raises(
            UserError, match=r"a\.json has lists as rows, without .*: write one object per line, with pan"
        ):
            load_problems(write(tmp_path / "a.json", rows))
    (row,) = load_problems(write(tmp_path / "a.json", {"prompt": chat, "answer": "7"}))
    assert row["problem"] == chat[0]["content"]


def test_a_text_file_is_read_if_it_has_json_and_is_named_otherwise(tmp_path):
    assert len(load_problems(write(tmp_path / "a.txt", GOOD, GOOD))) == 2
    with pytest.raises(UserError, match=r"b\.txt is text without JSON: end the name of a table in \.csv or \.tsv"):
        load_problems(write(tmp_path / "b.txt", "What is 3 + 4?\t7"))


def test_a_sheet_of_excel_is_read_and_a_book_of_several_names_them(tmp_path):
    openpyxl = pytest.importorskip("openpyxl")
    book, rows = openpyxl.Workbook(), [["Problem", "Answer", None], ["What is 3 + 4?", 7], [None, " "], ["0 + 0?", 0]]
    for row in rows:
        book.active.append(row)
    book.create_sheet("empty")
    book.save(tmp_path / "a.xlsx")
    assert values(load_problems(str(tmp_path / "a.xlsx")), "id", "answer") == [("a/2", "7"), ("a/4", "0")]
    book["empty"].append(["problem", "answer"])
    book.save(tmp_path / "a.xlsx")
    with pytest.raises(UserError, match=r"a\.xlsx contains the sheets Sheet, empty: name one as the split"):
        load_problems(str(tmp_path / "a.xlsx"))


def test_without_openpyxl_the_line_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    (tmp_path / "a.xlsx").write_bytes(b"PK\x03\x04")
    with pytest.raises(
        UserError, match=r"a\.xlsx is a workbook: pip install 'grpo_math\[excel\]' reads it, or save the"
    ):
        load_problems(str(tmp_path / "a.xlsx"))


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        # The solution is longer than the problem; the level has few values; the number counts the rows.
        (
            "Nr,Frage,Stufe,Loesung,Loesungsweg\n"
            + "".join(
                f'{i},Wie viel kosten {i} Hefte zu je 3 Euro?,{i % 3},{3 * i} Euro,"Ein Heft kostet 3 Euro, also kosten'
                f' {i} Hefte {i} mal 3 Euro"\n'
                for i in range(1, 9)
            ),
            "problem=Frage,answer=Loesung",
        ),
        ("Enoncé,Corrigé\nCalculer 3 + 4.,3 + 4 = 7 donc la réponse est #### 7\n", "problem=Enoncé,answer=Corrigé"),
        ("问题;答案;难度\n小明有三个苹果，又买了四个，一共几个？;7;易\n", "problem=问题,answer=答案"),
        ("question,Antwort,Stufe\nWhat is 3 + 4?,7 Euro,2\nWhat is 9 + 4?,13 Euro,2\n", "answer=Antwort"),
        ("Pergunta,a,b,c,d,Gabarito\nQuanto é 3 + 4?,6,7,8,9,b\n", "problem=Pergunta,answer=Gabarito"),
        ("Вопрос,Тема,Ответ\nСколько будет 3 + 4?,сложение,7\n", "problem=Вопрос,answer=Ответ"),
        ("Câu hỏi,Đáp án\n3 + 4 bằng bao nhiêu?,7\n", "'problem=Câu hỏi,answer=Đáp án'"),
        ("문제,보기1,보기2,정답\n3 + 4는 얼마입니까?,7,8,①\n", "problem=문제,answer=정답"),
    ],
)
def test_headers_of_another_language_give_the_line_to_paste(tmp_path, rows, columns):
    (tmp_path / "a.csv").write_text(rows)
    with pytest.raises(ConfigError) as error:
        load_problems(str(tmp_path / "a.csv"))
    assert error.value.remedy.endswith(f"; give --columns {columns}")
    (row, *_) = load_problems(str(tmp_path / "a.csv"), columns=columns.strip("'"))
    is_choice = "(A) " in row["problem"]
    assert is_choice or row["problem"].endswith(("?", "？", "."))
    assert row["answer"].startswith(("A", "B") if is_choice else ("3 Euro", "7"))


@pytest.mark.parametrize(
    "row",
    [
        {"question": "What is 3 + 4?", "qid": "2", "a": "6", "b": "7", "c": "8", "d": "9"},
        {"question": "What is 3 + 4?", "iIndex": 2, "answer_type": "integer", "answer_id": 3, "score": 7},
        {"question": "What is 3 + 4?", "answer_1": "6", "answer_2": "7", "hash": "7af3"},
        {"iIndex": 4, "text": "3 + 4 = 7", "0": 7},
    ],
)
def test_a_column_whose_name_does_not_say_that_it_is_the_answer_is_not_offered(tmp_path, row):
    with pytest.raises(DataError) as error:
        load_problems(write(tmp_path / "a.jsonl", row))
    assert f"its columns are {', '.join(row)}; accepted are " in str(error.value)
    assert "; name another one with --columns; correct the row" in str(error.value)


def test_a_comma_outside_quotes_does_not_move_the_answer(tmp_path):
    (tmp_path / "a.csv").write_text("problem,answer\nWhat is 1,000 + 2?,1002\nWhat is 3 + 4?,7\n")
    with pytest.raises(DataError, match=r"a\.csv:2: row has more cells than the file has columns"):
        load_problems(str(tmp_path / "a.csv"))
    assert [row["id"] for row in load_problems(str(tmp_path / "a.csv"), skip_bad_rows=True)] == ["a/3"]

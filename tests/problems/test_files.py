"""Files of rows as people have them: five formats, compressed or in UTF-16, and what cannot be read."""

import gzip
import json
from decimal import Decimal
from io import BytesIO

import pyarrow
import pytest
from pyarrow.parquet import write_table

from grpo_math.errors import DataError, UserError
from grpo_math.problems.datasets import load_problems

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
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_any_format_has_the_same_rows(tmp_path, name):
    (tmp_path / name).write_bytes(FILES[name])
    rows = load_problems(str(tmp_path / name))
    assert [{"problem": row["problem"], "answer": row["answer"]} for row in rows] == ROWS
    assert [row["id"] for row in rows] == [f"{name.partition('.')[0]}/{row['id'].rpartition('/')[2]}" for row in rows]


def parquet(**columns: list) -> bytes:
    file = BytesIO()
    write_table(pyarrow.table(columns), file)
    return file.getvalue()


CHATS = [[{"role": "user", "content": row["problem"]}] for row in ROWS]
DECIMALS = [Decimal("7.00"), Decimal("12345678901234567890.25")]


@pytest.mark.parametrize(
    ("name", "content", "golds"),
    [
        ("mine.parquet", parquet(prompt=CHATS, answer=DECIMALS), ["7.00", "12345678901234567890.25"]),
        ("huge.jsonl", f'{{"problem": "10^400?", "answer": 1{"0" * 400}}}'.encode(), ["1" + "0" * 400]),
        ("long.csv", f"problem,answer\n{'x' * 200_000},7\n".encode(), ["7"]),
    ],
)
def test_a_number_of_any_kind_is_a_gold_answer_and_a_cell_may_have_any_length(tmp_path, name, content, golds):
    (tmp_path / name).write_bytes(content)
    assert [row["answer"] for row in load_problems(str(tmp_path / name))] == golds


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (
            "a.parquet",
            b"PAR1 and no more",
            "ArrowInvalid: Could not open Parquet input source '<Buffer>': Parquet magic bytes not found in footer",
        ),
        ("a.csv", b'problem,answer\n"What is,7\n', "Error: unexpected end of data)"),
        ("a.csv", "problem,answer\ncaf\u00e9,7\n".encode("latin-1"), "UnicodeDecodeError: "),
        ("a.jsonl.gz", gzip.compress(b"x" * 1000, mtime=0)[:20], "EOFError: Compressed file ended before"),
        ("a.json", b'[{"problem": "a?",]', "JSONDecodeError: "),
        ("a.jsonl", None, "No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_reason_alone(tmp_path, capfd, name, content, reason):
    if content:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        load_problems(str(tmp_path / name))
    assert str(error.value).startswith(f"{tmp_path / name} cannot be read ({reason}")
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_a_comma_outside_quotes_does_not_move_the_answer(tmp_path):
    (tmp_path / "a.csv").write_text("problem,answer\nWhat is 1,000 + 2?,1002\nWhat is 3 + 4?,7\n")
    with pytest.raises(DataError, match=r"a\.csv:2: row has more cells than the file has columns"):
        load_problems(str(tmp_path / "a.csv"))
    assert [row["id"] for row in load_problems(str(tmp_path / "a.csv"), skip_bad_rows=True)] == ["a/3"]

"""Data by name, from local folders with the layout and columns of the Hub: sources.py, columns.py, datasets.py."""

import json

import datasets
import pytest

from grpo_math.errors import ConfigError, DataError
from grpo_math.problems.datasets import load_problems
from grpo_math.problems.sources import SOURCES, SUITES, hub_id, parse_ref

CHAT = [{"role": "user", "content": "What is 3 + 4?".join(SOURCES["dapo_original"].around)}]
# A row of each set with the columns that it has, as its loaders read them; the problem and the gold that follow.
PUBLISHED = {
    "numina_tir": (
        {"problem": "p?", "solution": "```python\nprint(7)\n```\n```output\n7\n```\nIt is \\boxed{7}.", "messages": []},
        ("p?", "7"),
    ),
    "numina_cot": (
        {"source": "amc", "problem": "p?", "solution": "so $\\boxed{\\frac{1}{2}}$"},
        ("p?", "\\frac{1}{2}"),
    ),
    "openr1": (
        {
            "problem": "p?",
            "solution": "long",
            "answer": "42",
            "problem_type": "Algebra",
            "source": "olympiads",
            "question_type": "math-word-problem",
            "uuid": "u",
            "generations": ["a", "b"],
            "correctness_count": 2,
        },
        ("p?", "42"),
    ),
    "dapo": (
        {
            "prompt": "p?",
            "solution": "34",
            "data_source": "math_dapo",
            "ability": "MATH",
            "source_prompt": CHAT,
            "reward_model": {"ground_truth": "34", "style": "rule"},
        },
        ("p?", "34"),
    ),
    "dapo_original": (
        {"data_source": "math_dapo", "prompt": CHAT, "reward_model": {"ground_truth": "7", "style": "rule"}},
        ("What is 3 + 4?", "7"),
    ),
    "deepscaler": ({"problem": "p?", "answer": "-\\frac{2}{3}", "solution": "see \\boxed{9}"}, ("p?", "-\\frac{2}{3}")),
    "big_math": (
        {"problem": "p?", "answer": "5", "source": "orca_math", "domain": ["Algebra"], "llama8b_solve_rate": 0.5},
        ("p?", "5"),
    ),
    "aime2024": (
        {"id": 60, "problem": "p?", "solution": "\\boxed{204}", "answer": "204", "url": "u", "year": "2024"},
        ("p?", "204"),
    ),
    **dict.fromkeys(
        ("aime2026", "hmmt_feb_2025", "hmmt_feb_2026"),
        ({"problem_idx": 1, "problem": "p?", "answer": "277"}, ("p?", "277")),
    ),
    "deepmath": (
        {"question": "p?", "final_answer": "Yes", "difficulty": 5.0, "topic": "Algebra", "r1_solution_1": "s"},
        ("p?", "Yes"),
    ),
    "polaris": ({"problem": "p?", "answer": "7", "difficulty": "8/8"}, ("p?", "7")),
    "aime2025": ({"problem": "p?", "answer": "70", "id": "0"}, ("p?", "70")),
    "amc2023": ({"id": 0, "question": "p?", "answer": "27.0", "url": "u"}, ("p?", "27.0")),
    "olympiadbench": (
        {
            "id": 1606,
            "question": "p?",
            "context": "Let $x>0$.",
            "final_answer": ["2", "3"],
            "solution": ["s"],
            "is_multiple_answer": True,
            "unit": None,
            "error": None,
            "answer_type": "Numerical",
            "subfield": "Algebra",
            "subject": "Math",
            "difficulty": "Competition",
            "language": "English",
        },
        ("Let $x>0$.\np?", "2, 3"),
    ),
    "minerva": ({"question": "p?", "answer": "4.5e33"}, ("p?", "4.5e33")),
}


@pytest.fixture(autouse=True)
def data_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_MATH_DATA", str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def put(folder, rows, split="train", config=None):
    """A folder as `hf download` leaves it: the card names its files, which are Parquet."""
    (folder / "data").mkdir(parents=True)
    datasets.Dataset.from_list(rows).to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: {config or 'default'}\n  data_files:\n  - split: {split}\n"
        f"    path: data/{split}-*\n---\n"
    )
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_set_is_read_by_its_name_from_a_copy_of_its_repository(tmp_path, name):
    row, expected = PUBLISHED[name]
    ours, theirs = next(iter(SOURCES[name].splits.items()))
    put(tmp_path / name, [row], theirs, SOURCES[name].config)
    for asked in (name, SOURCES[name].hub):
        (loaded,) = load_problems(asked, ours)
        assert (loaded["problem"], loaded["answer"]) == expected


def test_every_known_set_is_tried_here_or_with_its_own_files():
    assert PUBLISHED.keys() | {"gsm8k", "math", "math500"} == SOURCES.keys()
    assert set(SUITES["math"]) <= SOURCES.keys()


def test_rows_without_an_answer_and_repeated_problems_are_left_out_and_counted(tmp_path, caplog):
    rows = [
        {"problem": "a?", "answer": "1"},
        {"problem": "b?", "answer": "proof"},
        {"problem": "a?", "answer": "1"},
        {"problem": "c?", "answer": ""},
        {"problem": "d?", "answer": "2"},
        {"problem": "a?", "answer": "3"},
    ]
    put(tmp_path / "openr1", rows, config="default")
    assert [(row["problem"], row["answer"]) for row in load_problems("openr1")] == [("a?", "1"), ("d?", "2")]
    assert caplog.messages == [
        f"left out 2 of 4 rows of {tmp_path}/openr1: duplicate problems",
        f"skipped 2 of 4 rows of {tmp_path}/openr1; line 2: answer contains no gold answer",
    ]


def test_the_tolerances_are_those_of_the_sets_authors(tmp_path):
    row, _ = PUBLISHED["olympiadbench"]
    rows = [row, *({**row, "final_answer": ["2.5"], "error": error} for error in ("-1e-1", None)), {**row, "unit": "m"}]
    put(tmp_path / "olympiadbench", rows, config=SOURCES["olympiadbench"].config)
    assert [row.get("tolerance") for row in load_problems("olympiadbench", "test")] == [None, 0.1, 1e-8, None]
    put(tmp_path / "minerva", [{"question": "p?", "answer": answer} for answer in ("-200", "x")], "test")
    assert [row["tolerance"] for row in load_problems("minerva", "test")] == [0.002, None]


# Any other set


def test_the_name_of_a_data_set_tells_where_it_comes_from(tmp_path):
    (tmp_path / "a:b@c").touch()
    assert [hub_id(name) for name in (str(tmp_path), "a/b.csv.gz")] == [None, None]
    assert parse_ref(str(tmp_path / "a:b@c")).path == str(tmp_path / "a:b@c")
    assert parse_ref("a:b:c").path == "a:b:c"


def test_columns_without_a_common_name_are_named(tmp_path):
    folder = put(tmp_path / "own", [{"query": "a?", "meta": {"gold": 3, "note": "n"}, "kind": "sum", "big": "x"}])
    (row,) = load_problems(f"{folder}/", columns="problem=query, answer=meta.gold,subject=kind")
    assert {**row, "prompt": 0} == {
        "id": "own/1",
        "prompt": 0,
        "problem": "a?",
        "answer": "3",
        "answer_format": "gsm8k",
        "subject": "sum",
        "query": "a?",
        "meta": {"gold": 3, "note": "n"},
        "kind": "sum",
        "big": "x",
    }
    with pytest.raises(ConfigError) as error:
        load_problems(str(folder))
    assert str(error.value) == (
        f"dataset='{folder}' has no column for the answer: its columns are query, meta, kind, big; give --"
        "columns answer=meta.gold"
    )
    folder = put(tmp_path / "no gold", [{"query": "a?"}])
    with pytest.raises(ConfigError, match=r"no column for the answer: .*; accepted are target; name another one with"):
        load_problems(str(folder), columns="answer=target")


def test_trls_chats_are_read(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a?"}]
    folder = put(tmp_path / "trl", [{"prompt": chat, "solution": "\\boxed{1}"}])
    (row,) = load_problems(str(folder), template="as_is")
    assert (row["problem"], row["answer"], row["prompt"]) == ("a?", "1", chat)
    turns = [*chat, {"role": "assistant", "content": "b"}]
    for number, chat in enumerate([turns, [*turns, {"role": "user", "content": "c?"}], turns[2:], []]):
        folder = put(tmp_path / f"turns{number}", [{"prompt": chat, "answer": "1"}])
        with pytest.raises(
            DataError, match=r"prompt is (a chat (of more than one turn|without a question)|of type list)"
        ):
            load_problems(str(folder))


USER = {"role": "user", "content": "What is 6 times 8?"}


@pytest.mark.parametrize(
    "chat",
    [
        [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}, USER],
        [USER, {"role": "assistant", "content": "It is"}],
        [{"role": "user", "content": [{"type": "text", "text": USER["content"]}]}],
        f"<|im_start|>user\n{USER['content']}<|im_end|>\n<|im_start|>assistant\n",
    ],
)
@pytest.mark.parametrize("column", ["prompt", "question"])
def test_as_is_keeps_any_prompt_that_trl_trains_on(tmp_path, chat, column):
    (tmp_path / "a.jsonl").write_text(json.dumps({column: chat, "answer": "48"}))
    (row,) = load_problems(str(tmp_path / "a.jsonl"), template="as_is")
    assert (row["prompt"], row["answer"]) == (chat, "48")
    assert row["problem"] == (chat.strip() if isinstance(chat, str) else USER["content"])


def test_the_instructions_of_a_known_set_are_removed_from_a_copy_of_another_name(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": CHAT, "answer": "7"}))
    (row,) = load_problems(str(tmp_path / "a.jsonl"))
    assert row["problem"] == "What is 3 + 4?"
    (row,) = load_problems(str(tmp_path / "a.jsonl"), template="as_is")
    assert row["prompt"] == CHAT


def test_splits_are_cut_and_named(tmp_path):
    rows = [{"question": f"p{i}?", "answer": f"#### {i}", "level": [i]} for i in range(10)]
    folder = put(tmp_path / "cut", rows)
    file = tmp_path / "gsm8k" / "train.jsonl"
    file.parent.mkdir()
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    put(tmp_path / "polaris", rows)
    cuts = {"train[8:]": ["8", "9"], "train[:20%]": ["0", "1"], "train[-1:]": ["9"], "train[2:4]": ["2", "3"]}
    for dataset in (str(folder), "gsm8k", str(file), "polaris"):
        assert {cut: [row["answer"] for row in load_problems(dataset, cut)] for cut in cuts} == cuts
    assert load_problems("gsm8k", "train[8:]")[0]["id"] == "gsm8k/train/9"
    with pytest.raises(ConfigError, match=r"is not a valid part of a split \(.*\): write train\[200:\]"):
        load_problems("gsm8k", "train[x]")
    with pytest.raises(ConfigError, match=r"split='test' is not known: use one of train"):
        load_problems(str(folder), "test")


def test_a_folder_is_read_again_after_a_change_and_a_broken_file_is_one_line(tmp_path):
    folder = put(tmp_path / "x", [{"problem": "a?", "answer": "1"}])
    assert [row["answer"] for row in load_problems(str(folder))] == ["1"]
    (file,) = (folder / "data").iterdir()
    datasets.Dataset.from_list([{"problem": "a?", "answer": "2"}]).to_parquet(file)
    assert [row["answer"] for row in load_problems(str(folder))] == ["2"]
    file.write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigError, match=r"^dataset='.*' is a folder that cannot be read \(ArrowInvalid.*$"):
        load_problems(str(folder))

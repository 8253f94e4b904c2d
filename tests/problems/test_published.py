"""sources.py, columns.py, hub.py: data by name, from local folders of the same layout and columns as on the Hub."""

import json

import datasets
import pytest

from grpo_math.errors import ConfigError, DataError
from grpo_math.problems import columns
from grpo_math.problems.datasets import load_problems
from grpo_math.problems.sources import DAPO_AFTER, DAPO_BEFORE, SOURCES, SUITES, hub_id

CHAT = [{"role": "user", "content": f"{DAPO_BEFORE}What is 3 + 4?{DAPO_AFTER}"}]
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
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def put(folder, rows, split="train", config=None):
    """A folder as `hf download` leaves it: the card names its files, which are Parquet."""
    (folder / "data").mkdir(parents=True)
    datasets.Dataset.from_list(rows).to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
    files = f"- config_name: {config or 'default'}\n  data_files:\n  - split: {split}\n    path: data/{split}-*\n"
    (folder / "README.md").write_text(f"---\nconfigs:\n{files}---\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_set_is_read_by_its_name_from_a_copy_of_its_repository(tmp_path, name):
    row, expected = PUBLISHED[name]
    source = SOURCES[name]
    ours, theirs = next(iter(source.splits.items()))
    put(tmp_path / name, [row], theirs, source.config)
    for asked in (name, source.hub):
        (loaded,) = load_problems(asked, ours, data_dir=str(tmp_path))
        assert (loaded["problem"], loaded["answer"]) == expected


def test_every_known_set_is_tried_here_or_with_its_own_files():
    assert PUBLISHED.keys() | {"gsm8k", "math", "math500"} == SOURCES.keys()
    assert set(SUITES["math"]) <= SOURCES.keys()
    contests = {"aime2024", "aime2025", "aime2026", "amc2023", "hmmt_feb_2025", "hmmt_feb_2026"}
    assert {name for name, source in SOURCES.items() if source.samples > 1} == contests


def test_rows_without_an_answer_and_repeated_problems_are_left_out_and_counted(tmp_path, caplog):
    rows = [
        {"problem": "a?", "answer": "1"},
        {"problem": "b?", "answer": "proof"},
        {"problem": "a?", "answer": "1"},
        {"problem": "c?", "answer": ""},
        {"problem": "d?", "answer": "2"},
    ]
    put(tmp_path / "openr1", rows, config="default")
    assert [row["problem"] for row in load_problems("openr1", data_dir=str(tmp_path))] == ["a?", "d?"]
    assert caplog.messages == [
        f"left out 1 of 3 rows of {tmp_path}/openr1: duplicate problems",
        f"skipped 2 of 4 rows of {tmp_path}/openr1; line 2: answer contains no gold answer",
    ]


def test_the_tolerances_are_those_of_the_sets_authors(tmp_path):
    row, _ = PUBLISHED["olympiadbench"]
    single = {**row, "final_answer": ["2.5"], "error": "1e-1"}
    put(tmp_path / "olympiadbench", [row, {**single, "id": 2}, {**single, "id": 3, "error": None}], "train", "x")
    config = SOURCES["olympiadbench"].config
    card = tmp_path / "olympiadbench" / "README.md"
    card.write_text(card.read_text().replace(": x", f": {config}"), encoding="utf-8")
    loaded = load_problems("olympiadbench", "test", data_dir=str(tmp_path))
    assert [row["tolerance"] for row in loaded] == [None, 0.1, 1e-8]
    put(tmp_path / "minerva", [{"question": "p?", "answer": "200"}, {"question": "q?", "answer": "x"}], "test")
    assert [row["tolerance"] for row in load_problems("minerva", "test", data_dir=str(tmp_path))] == [0.002, None]


# Any other set


def test_a_folder_with_columns_of_its_own_says_which_is_which(tmp_path):
    folder = put(tmp_path / "own", [{"query": "a?", "meta": {"gold": 3, "note": "n"}, "kind": "sum", "big": "x"}])
    for names in ("answer=meta.gold,subject=kind", "problem=query, answer=meta.gold, subject=kind"):
        (row,) = load_problems(str(folder), columns=names)
        assert (row["problem"], row["answer"], row["subject"], row["id"]) == ("a?", "3", "sum", "own/1")
    with pytest.raises(ConfigError) as error:
        load_problems(str(folder))
    assert str(error.value) == (
        f"dataset='{folder}' has no column for the answer: its columns are query, meta, kind, big; accepted are "
        f"{', '.join(columns.ACCEPTED['answer'])}, or say --columns answer=NAME"
    )
    with pytest.raises(
        ConfigError, match=r"no column for the answer: its columns are query, .*; accepted are target, or"
    ):
        load_problems(str(folder), columns="answer=target")


def test_trls_chats_are_read(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a?"}]
    folder = put(tmp_path / "trl", [{"prompt": chat, "solution": "\\boxed{1}"}])
    assert [(row["problem"], row["answer"]) for row in load_problems(str(folder))] == [("a?", "1")]
    turns = [*chat, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c?"}]
    folder = put(tmp_path / "turns", [{"prompt": turns, "answer": "1"}])
    with pytest.raises(DataError, match="prompt is a chat of more than one question"):
        load_problems(str(folder))


def test_a_split_of_the_data_folders_own_files_is_cut_too(tmp_path):
    (tmp_path / "gsm8k").mkdir()
    rows = [json.dumps({"question": f"p{i}?", "answer": f"#### {i}"}) for i in range(10)]
    (tmp_path / "gsm8k" / "train.jsonl").write_text("\n".join(rows), encoding="utf-8")
    for split, answers in (("train[8:]", ["8", "9"]), ("train[:20%]", ["0", "1"]), ("train[-1:]", ["9"])):
        assert [row["answer"] for row in load_problems("gsm8k", split, data_dir=str(tmp_path))] == answers
    with pytest.raises(ConfigError, match=r"is not cut as a split can be \(.*\): write train\[200:\]"):
        load_problems("gsm8k", "train[x]", data_dir=str(tmp_path))


def test_splits_are_cut_and_named(tmp_path):
    folder = put(tmp_path / "cut", [{"problem": f"p{i}?", "answer": "1", "level": [i]} for i in range(10)])
    assert [row["problem"] for row in load_problems(str(folder), "train[8:]")] == ["p8?", "p9?"]
    assert len(load_problems(str(folder), "train[:30%]")) == 3
    with pytest.raises(ConfigError, match=r"split='test' is not known: use one of train"):
        load_problems(str(folder), "test")


def test_a_path_that_is_not_there_is_refused(tmp_path):
    assert hub_id(str(tmp_path)) is None
    for path in ("./nowhere", "/no/where", "a/b/c"):
        with pytest.raises(ConfigError, match="is not a file, a folder or an id on the Hub"):
            load_problems(path)


def test_a_folder_is_read_again_after_a_change_and_a_broken_file_is_one_line(tmp_path):
    folder = put(tmp_path / "x", [{"problem": "a?", "answer": "1"}])
    assert [row["answer"] for row in load_problems(str(folder))] == ["1"]
    (file,) = (folder / "data").iterdir()
    datasets.Dataset.from_list([{"problem": "a?", "answer": "2"}]).to_parquet(file)
    assert [row["answer"] for row in load_problems(str(folder))] == ["2"]
    file.write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigError, match=r"^dataset='.*' is a folder that cannot be read \(ArrowInvalid.*$"):
        load_problems(str(folder))

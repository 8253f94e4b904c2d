"""Problems whose parts have columns of their own: the model gets all of them, or an error names the column."""

import json

import pytest

from grpo_math.errors import ConfigError
from grpo_math.problems.datasets import load_problems

SUM = "What is 3 + 4?"
LETTERED = f"{SUM}\n(A) 6\n(B) 7\n(C) 8"
FILMS = {"Body": "A box is sold for 76 dollars, today 25 less.", "Question": "What does a box cost today?"}
PIES = "Tim ate 3 pies and 4 cakes."
MANY = "How many did he eat?"
A, B, C = texts = ["6", "7", "8"]

# The layout of a published set -> the problem and the gold answer.
LAYOUTS = {
    "SVAMP": ({**FILMS, "Equation": "( 76.0 - 25.0 )", "Answer": 51.0}, "\n".join(FILMS.values()), "51.0"),
    "ASDiv": ({"body": PIES, "question": MANY, "answer": "7", "formula": "3+4=7"}, f"{PIES}\n{MANY}", "7"),
    "NumGLUE": ({"passage": PIES, "question": MANY, "answer": "7"}, f"{PIES}\n{MANY}", "7"),
    "TabMWP": ({"question": MANY, "table": "pies | 3", "choices": None, "answer": "7"}, f"pies | 3\n{MANY}", "7"),
    "Alpaca": ({"instruction": MANY, "input": PIES, "output": "3+4=7", "answer": "7"}, f"{MANY}\n{PIES}", "7"),
    "a context that is empty": ({"context": "", "problem": SUM, "answer": "7"}, SUM, "7"),
    "a context that is in the problem": ({"context": "3 + 4", "problem": SUM, "answer": "7"}, SUM, "7"),
    "AQuA": ({"question": SUM, "options": ["A)6", "B)7", "C)8"], "rationale": "", "correct": "B"}, LETTERED, "B"),
    "MathQA": ({"Problem": SUM, "options": "a ) 6 , b ) 7 , c ) 8", "correct": "b"}, LETTERED, "B"),
    "MMLU": ({"question": SUM, "subject": "math", "choices": texts, "answer": 1}, LETTERED, "B"),
    "MMLU in columns": ({"question": SUM, "A": A, "B": B, "C": C, "answer": "B"}, LETTERED, "B"),
    "MMLU-Pro": ({"question": SUM, "options": texts, "answer": "B", "answer_index": 1}, LETTERED, "B"),
    "ARC": ({"question": SUM, "choices": {"text": texts, "label": ["A", "B", "C"]}, "answerKey": "B"}, LETTERED, "B"),
    "ARC with digits": (
        {"question": SUM, "choices": {"text": texts, "label": ["1", "2", "3"]}, "answerKey": "2"},
        LETTERED,
        "B",
    ),
    "SciQ": ({"question": SUM, "distractor1": A, "distractor2": C, "correct_answer": B}, LETTERED, "B"),
    "GPQA": ({"Question": SUM, "Correct Answer": B, "Incorrect Answer 1": C, "Incorrect Answer 2": A}, LETTERED, "B"),
    "MedMCQA": ({"question": SUM, "opa": A, "opb": B, "opc": C, "cop": 1}, LETTERED, "B"),
    "MedQA": ({"question": SUM, "options": {"A": A, "B": B, "C": C}, "answer": B}, LETTERED, "B"),
    "TAL-SCQ5K": (
        {"problem": SUM, "answer_option_list": [[{"aoVal": "A", "content": text}] for text in texts], "answer": "B"},
        LETTERED,
        "B",
    ),
    "an index from 1": ({"question": SUM, "choices": texts, "answer": 3}, LETTERED, "C"),
    "a number that is an option": ({"question": SUM, "choices": [6, 7, 8], "answer": 7}, LETTERED, "B"),
    "a cell of a table": ({"question": SUM, "choices": "['6', '7', '8']", "answer": "7"}, LETTERED, "B"),
    "columns of numbers": (
        {"question": SUM, "option1": A, "option2": B, "option3": C, "answer": "option2"},
        LETTERED,
        "B",
    ),
    "options in the problem": (
        {"question": f"{SUM} A. 6 B. 7", "choices": [A, B], "answer": 1},
        f"{SUM} A. 6 B. 7",
        "B",
    ),
    "a letter in LaTeX": ({"question": SUM, "choices": texts, "solution": r"so $\boxed{\text{(B)}}$"}, LETTERED, "B"),
    "an index next to a list": ({"question": SUM, "alternatives": texts, "answer_idx": 1}, LETTERED, "B"),
    "an index next to a list and tags": (
        {"question": SUM, "alternatives": texts, "tags": ["a", "b"], "messages": [{"role": "user"}], "answer_idx": 1},
        LETTERED,
        "B",
    ),
    "an index next to a list that is too short": (
        {"question": SUM, "alternatives": texts, "authors": ["a"], "years": [1, 2], "answer_index": 3},
        LETTERED,
        "C",
    ),
    "a letter next to a list": ({"question": SUM, "alternatives": texts, "answerKey": "b"}, LETTERED, "B"),
    "a letter next to a list of another name": (
        {"question": SUM, "alternatives": texts, "answer": "(b)"},
        LETTERED,
        "B",
    ),
    "a letter next to a list in an object": (
        {"question": SUM, "meta": {"alternatives": texts, "id": "x"}, "answer": "B) 7"},
        LETTERED,
        "B",
    ),
    "a letter next to tags": ({"question": SUM, "tags": ["a", "b"], "answer": "B"}, SUM, "B"),
    "the second option in words": (
        {"question": SUM, "choices": ["2", "7", "8"], "answer": "Option 2"},
        f"{SUM}\n(A) 2\n(B) 7\n(C) 8",
        "B",
    ),
    "objects with another text key": (
        {"question": SUM, "answers": [{"body": text, "right": text == B} for text in texts], "correct_option": "2.0"},
        LETTERED,
        "C",
    ),
    "objects in another order": (
        {"question": SUM, "options": [{"id": i, "n": n} for i, n in zip("BAC", (7, 6, 8), strict=True)], "answer": "B"},
        LETTERED,
        "B",
    ),
    "tags next to a number": ({"question": SUM, "tags": ["a", "b"], "steps": ["3", "4"], "answer": 1}, SUM, "1"),
    "a label next to a list": ({"question": SUM, "alternatives": texts, "label": 1}, SUM, "1"),
    "a key that is a value": ({"question": SUM, "tags": ["a", "b"], "answerKey": "70"}, SUM, "70"),
    "wrong options that are numbers": (
        {"question": SUM, "correct": 2, "distractors": ["1", "0"]},
        f"{SUM}\n(A) 0\n(B) 1\n(C) 2",
        "C",
    ),
    "a box is never an index": ({"question": SUM, "choices": texts, "solution": r"\boxed{1}"}, LETTERED, "1"),
    "an answer that is no option": ({"question": SUM, "choices": texts, "answer": "7" * 5000}, LETTERED, "7" * 5000),
    "numbers of the problem": ({"question": SUM, "a": 3, "b": 4, "c": 12, "answer": "7"}, SUM, "7"),
    "other columns": (
        {"i": 17, "question": MANY, "source": "aime 2024, problem 3", "answer": "7", "text": f"{MANY} 3 and 4 are 7"},
        MANY,
        "7",
    ),
}
UNREAD = "has a column {!r} that looks like a part of the problem, and is not read: give --columns problem={}"
REFUSED = {
    "an unknown name": ({"intro": PIES, "question": MANY, "answer": "8"}, UNREAD.format("intro", "intro+question")),
    "a context in parts": ({"context": {"a": [PIES]}, "question": MANY, "answer": "8"}, UNREAD.format("context", "c")),
    "a list of numbers": ({"question": "Make 24.", "nums": [4, 6], "answer": "4*6"}, UNREAD.format("nums", "nums+q")),
    "options without letters": ({"question": SUM, "options": "6 / 8", "answer": "6"}, UNREAD.format("options", "o")),
    "an index without options": (
        {"question": SUM, "answer_idx": 1, "tags": ["a", "b"]},
        "'answer_idx' that are indices by",
    ),
    "an index next to two lists": (
        {"question": SUM, "one": texts, "two": texts, "answer_idx": 1},
        "several columns may be their options: one, two: name the column of options 'options', or give --columns",
    ),
    "objects with two text keys": (
        {"question": SUM, "options": [{"en": text, "de": f"{text}."} for text in texts], "answer": 1},
        UNREAD.format("options", "options+question"),
    ),
    "a countdown": (
        {"prompt": "Make 98 of 44, 19 and 35.", "target": 98, "nums": [44, 19, 35]},
        "has gold answers in the column 'target' that occur in their problems, as in a countdown: give --columns",
    ),
}


def rows_file(folder, row):
    (folder / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    return str(folder / "rows.jsonl")


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_model_sees_the_whole_problem_and_the_gold_answer_is_what_it_has_to_write(tmp_path, caplog, name):
    row, problem, gold = LAYOUTS[name]
    loaded = load_problems(rows_file(tmp_path, row))[0]
    assert (loaded["problem"], loaded["answer"]) == (problem, gold)
    assert loaded["prompt"][-1]["content"] == problem


@pytest.mark.parametrize("name", REFUSED)
def test_a_part_of_the_problem_that_is_not_read_is_named_with_the_line_to_paste(tmp_path, name):
    row, message = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        load_problems(rows_file(tmp_path, row))
    assert message in str(error.value)


def test_named_columns_are_the_users_choice(tmp_path):
    file = rows_file(tmp_path, {"intro": PIES, "Question": MANY, "target": 3, "context": "of a test"})
    stated = {"problem=intro+Question": f"{PIES}\n{MANY}", "problem=Question": MANY}
    for problem, expected in stated.items():
        (row, *_) = load_problems(file, columns=f"{problem},answer=target")
        assert (row["problem"], row["answer"]) == (expected, "3")


VALUES = [("2", ["2", "4", "3"]), ("1", ["5", "4", "1"]), ("3", ["3", "9", "17"]), ("17", ["17", "2", "3"])]
FORMS = {  # of a gold answer and options: each gold answer is the value of an option
    "a box in a solution": lambda gold, texts: {"options": texts, "solution": rf"It is \boxed{{{gold}}}."},
    "a list of one": lambda gold, texts: {"options": texts, "answer": [gold]},
    "LaTeX": lambda gold, texts: {"options": [f"${text}$" for text in texts], "answer": gold},
    "a unit": lambda gold, texts: {"options": [f"{text} cm" for text in texts], "answer": gold},
    "halves": lambda gold, texts: {"options": [rf"$\frac{{{text}}}{{2}}$" for text in texts], "answer": int(gold) / 2},
    "a number next to texts": lambda gold, texts: {"options": texts, "answer_index": int(gold)},
    "a text next to numbers": lambda gold, texts: {"options": [*map(int, texts)], "answer": gold},
    "labels that are digits": lambda gold, texts: {"options": dict(zip("123", texts, strict=True)), "answer": gold},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_number_that_cannot_be_an_index_shows_that_numbers_are_values(tmp_path, caplog, form):
    rows = [{"question": f"Number {i}?", **FORMS[form](*one)} for i, one in enumerate(VALUES)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["answer"] for row in load_problems(str(tmp_path / "rows.jsonl"))] == ["A", "C", "A", "A"]
    assert not caplog.records


COLOURS = ["red", "blue", "green", "pink"]
SAID = {  # the options and the numbers of a file -> the gold answers, and the warning
    "indices from 0, or from 1": (COLOURS, [2, 1], ["C", "B"], "read as indices of options from 0, because none is 0"),
    "texts": (["2", "1", "0"], ["2", "1"], ["A", "B"], "fit as values of options and as indices: read as values, not"),
    "numbers": (["2", "1", "3"], [2, 1], ["C", "B"], "fit as values of options and as indices: read as indices, not"),
    "the same either way": (["0", "1", "3"], ["0", "1"], ["A", "B"], None),
    "no option": (["2", "7", "9"], ["7", "1", "2"], ["B", "1", "A"], "1 of 3 gold answers of "),
    "an index that is too large": (
        COLOURS,
        [0, 3, 9],
        ["A", "D", "9"],
        "name no option, and stay as they are; the first",
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_a_number_that_may_be_something_else_is_named(tmp_path, caplog, name):
    texts, golds, expected, message = SAID[name]
    rows = [{"question": f"Number {i}?", "choices": texts, "correct": gold} for i, gold in enumerate(golds)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["answer"] for row in load_problems(str(tmp_path / "rows.jsonl"))] == expected
    assert message in caplog.text if message else not caplog.records


def test_a_letter_names_no_option_if_another_gold_answer_is_no_letter(tmp_path):
    rows = [{"question": f"Number {i}?", "alternatives": texts, "answer": gold} for i, gold in enumerate("A7")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["problem"] for row in load_problems(str(tmp_path / "rows.jsonl"))] == ["Number 0?", "Number 1?"]


def test_a_column_of_numbers_that_may_be_indices_is_named(tmp_path, caplog):
    file = rows_file(tmp_path, {"question": SUM, "one": texts, "two": texts, "cop": 1})
    assert load_problems(file)[0]["answer"] == "1"
    assert "rows.jsonl has gold answers in the column 'cop' that are indices by its name (1, 1, 1), and" in caplog.text
    caplog.clear()
    assert load_problems(file, columns="answer=cop")[0]["answer"] == "1"
    assert not caplog.records


def test_an_index_is_read_by_what_the_whole_set_has(tmp_path):
    rows = [{"question": f"{i}?", "choices": ["1", "2", "3"], "answer": answer} for i, answer in enumerate("1203")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # "0" is not an option, so that all are indices, and the third one of four counts from 0.
    assert [row["answer"] for row in load_problems(str(tmp_path / "rows.jsonl"))] == ["B", "C", "A", "3"]

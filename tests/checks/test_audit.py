"""The audit: each planted fault is found on its line, and nothing else."""

import json
from types import SimpleNamespace

import pytest

from grpo_math.checks import audit
from grpo_math.checks.audit import repeated
from grpo_math.checks.row_kinds import BY_TEXT, faults
from grpo_math.cli import main
from grpo_math.grading import grade

NOUNS = (
    "apple",
    "boat",
    "chair",
    "drum",
    "engine",
    "feather",
    "guitar",
    "hammer",
    "island",
    "jacket",
    "kettle",
    "ladder",
)
GOOD = [
    (f"A {noun} costs {i + 3} coins and a {noun} case {2 * i + 1}. What do both cost?", str(3 * i + 4))
    for i, noun in enumerate(NOUNS)
]
TEST = "Bella walks 12 miles on each of 9 days and then rests by the lake for 31 hours in all. How far did she walk?"
FAULTS = {
    "no gold answer": [
        ("How many primes are there?", "not found"),
        ("What is the sum?", r"\text{N/A}"),
        ("Why?", "None"),
        ("What is a?", ""),
        ("What is b?", None),
        ("What is c?", "N.A."),
        ("What is e?", "略"),
    ],
    "gold answers that are a unit only": [
        ("How long is the rope?", "cm"),
        ("How heavy?", r"\text{ kg}"),
        ("How fast?", "km/h"),
        ("Which angle?", r"^\circ"),
    ],
    "gold answers that are damaged (a lost backslash, or a label)": [
        ("How long is it in cm?", "5\text{ cm}"),
        ("How much is it?", "Answer: 5"),
        ("Which angle is it?", "60^\n"),
    ],
    "problems that contain their answer": [
        ("#### 108\nHow much is half of 216 nuts?", "108"),
        (r"Find the area of the disk. It is $\boxed{9\pi}$.", r"9\pi"),
    ],
    "gold answers in prose, which nobody can match": [
        ("What does f do?", "the function grows whenever its argument does"),
        ("What is d?", "Answers may vary."),
        ("Does 2 divide 4n?", "We have shown this for each n."),
    ],
    "multiple-choice letters": [
        ("Which one holds?", "(B)"),
        ("Which is larger?", r"\text{C}"),
        ("Which is smaller?", "B) 12"),
        ("And now?", "Option D"),
        ("And then?", "The correct answer is A."),
        ("Which number is prime? ① 4 ② 7", "②"),
        ("Which is a square? ① 5 ② 7 ③ 9", "③"),
    ],
    "contradictory gold answers": [("Halve 46 books.", "23"), ("halve 46  books.", "24")],
    "gold answers that are not correct against themselves": [("Divide it.", r"\frac{1}{")],
    "problems longer than 100 tokens": [("word " * 120 + "?", "77")],
    "problems of tests.jsonl, a test set": [(TEST, "108")],
    "rows that cannot be used": ["{not json", ("", "7")],
}
REPEATED = (GOOD[0][0].replace("What do", "How much do"), GOOD[0][1])


def write(path, rows):
    path.write_text(
        "".join(
            (row if isinstance(row, str) else json.dumps({"problem": row[0], "answer": row[1]})) + "\n" for row in rows
        )
    )


def audited(capsys, *words: str) -> tuple[int, dict]:
    code = main(["audit", "mine.jsonl", "--tests", "tests.jsonl", "--prompt_tokens", "100", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "tests.jsonl", [(TEST, "108")])
    return tmp_path


def test_each_planted_fault_is_found_on_its_line_and_the_other_rows_are_written(here, capsys):
    bad = [row for rows in FAULTS.values() for row in rows]
    write(here / "mine.jsonl", [*GOOD, *bad, REPEATED])
    code, result = audited(capsys)
    lines = {one["kind"]: one["lines"] for one in result["faults"]}
    expected, line = {}, len(GOOD)
    for kind, rows in FAULTS.items():
        expected[kind] = list(range(line + 1, line + 1 + len(rows)))
        line += len(rows)
    expected[BY_TEXT.name] = expected["gold answers that are not correct against themselves"]
    assert lines == {**expected, "near-duplicate problems": [line + 1]}
    assert (code, result["rows"], result["left_out"]) == (1, len(GOOD) + len(bad) + 1, len(bad) + 1)
    code, result = audited(capsys, "--write_clean", "clean.jsonl")
    assert (code, result["files"]) == (0, ["clean.jsonl", "clean.jsonl.left_out.jsonl"])
    assert (here / "clean.jsonl").read_text().splitlines() == (here / "mine.jsonl").read_text().splitlines()[
        : len(GOOD)
    ]
    others = [json.loads(line) for line in (here / "clean.jsonl.left_out.jsonl").read_text().splitlines()]
    assert [one["line"] for one in others] == list(range(len(GOOD) + 1, line + 2))
    assert all(one["reasons"] and one["row"] for one in others)
    (here / "mine.jsonl").unlink()
    (here / "clean.jsonl").rename(here / "mine.jsonl")
    assert audited(capsys)[0] == 0


def test_the_numbers_and_the_answer_of_another_problem_in_other_words_are_no_repetition():
    problems = ("Ada has 3 pens and 1 ruler. How many things?", "A dog is 3 and a cat is 1. How old are both?")
    assert [*repeated([{"problem": problem, "answer": "4", "line": 1} for problem in problems])] == []


def test_numbers_are_written_bare_if_the_answer_itself_is_correct_against_them(here, capsys):
    odd = ["R$ 17,36", "1.234,50 €", "Es sind 93 Äpfel.", "93 Äpfel", "17,36 zł", "65.990 €"]
    write(here / "mine.jsonl", [*GOOD, *((f"How many are {i} boxes?", gold) for i, gold in enumerate(odd))])
    code, result = audited(capsys, "--write_clean", "clean.jsonl", "--bare_numbers")
    lines = {one["kind"]: (one["lines"], one["left_out"]) for one in result["faults"]}
    first = len(GOOD) + 1
    assert lines == {
        "gold answers that are correct only in their own text": ([first, first + 1, first + 4, first + 5], False),
        "gold answers in prose, which nobody can match": ([first + 2], True),
        "gold answers that are not correct against their number": ([first + 5], True),
    }
    assert (code, result["left_out"]) == (0, 1)
    rows = [json.loads(line) for line in (here / "clean.jsonl").read_text().splitlines()]
    assert [row["bare_answer"] for row in rows[len(GOOD) :]] == ["17.36", "1234.50", "93", "93", "17.36"]
    assert all(grade(row["bare_answer"], row["answer"], answer_format="direct") for row in rows[len(GOOD) :])
    assert "65.990 €" in (here / "clean.jsonl.left_out.jsonl").read_text()
    main(["audit", "mine.jsonl", "--tests", ""])
    out = capsys.readouterr().out
    assert "\n         line 13, 'R$ 17,36': '17.36' is wrong\n         line 14, " in out
    assert main(["audit", "mine.jsonl", "--bare_numbers"]) == 2


def test_numbers_in_words_that_the_grader_does_not_read_are_named(here, capsys):
    odd = ["18 (since 9 + 9)", "3-Apr", "2 hours 5 minutes", "1/2 (0.5)", "3/4, 0.75", "18 apples", "Friday", "2ab"]
    write(
        here / "mine.jsonl",
        [*GOOD, *((f"A rope of {i} m has ends a and b. Which?", gold) for i, gold in enumerate(odd))],
    )
    lines = {one["kind"]: [line - len(GOOD) for line in one["lines"]] for one in audited(capsys)[1]["faults"]}
    assert lines == {BY_TEXT.name: [1, 2, 3], "gold answers that are correct only in their own text": [4, 5]}


def test_choices_are_kept_if_the_user_wants_them(here, capsys):
    choices = [("Which number is prime?\n(A) 4\n(B) 7", "B"), ("소수를 고르시오. ① 4 ② 7", "②")]
    write(here / "mine.jsonl", [*GOOD, *choices])
    assert audited(capsys, "--write_clean", "clean.jsonl")[1]["left_out"] == 2
    result = audited(capsys, "--write_clean", "kept.jsonl", "--keep_choices")[1]
    assert (result["left_out"], result["read_as"]["choice"]) == (0, 2)
    (kind,) = [one for one in result["faults"] if one["kind"] == "multiple-choice letters"]
    assert (kind["count"], kind["left_out"]) == (2, False)


@pytest.mark.parametrize("name", ["mine.csv", "mine.jsonl"])
def test_rows_are_shown_and_written_as_text(here, capsys, name):
    row = {"problem": "사과 3개와 4개를 더하면 모두 몇 개입니까?", "answer": "모른다"}
    rows = [row, {"problem": row["problem"], "answer": ""}]
    content = "".join(json.dumps(one) + "\n" for one in rows)
    if name == "mine.csv":
        content = "problem,answer\n" + "".join(f"{one['problem']},{one['answer']}\n" for one in rows)
    (here / name).write_text(content)
    assert main(["audit", name, "--tests", "", "--write_clean", "clean.jsonl"]) == 0
    out = capsys.readouterr().out
    assert '{"problem": "사과' in out
    assert out.splitlines()[-1] == "ok: 1 of 2 rows have a fault, 1 are written"
    assert json.dumps(row, ensure_ascii=False) + "\n" == (here / "clean.jsonl").read_text()
    assert "사과" in (here / "clean.jsonl.left_out.jsonl").read_text()


def test_nothing_written_is_not_ok(here, capsys):
    write(here / "mine.jsonl", [("Why?", "cm")])
    assert main(["audit", "mine.jsonl", "--tests", "", "--write_clean", "clean.jsonl"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "not ok: 1 of 1 rows have a fault, 0 are written"


@pytest.mark.parametrize("problem", [r"How many? It is \boxed{5}.", r"Сколько? Ответ: \boxed{５}.", r"كم؟ \boxed{٥}."])
def test_an_answer_that_its_problem_marks_is_found_in_the_digits_of_each_script(problem):
    row = {"problem": problem, "answer": "5"}
    assert [fault.check for fault in faults(row)] == ["problems that contain their answer"]


def test_a_file_is_not_overwritten_and_a_set_that_is_missing_is_a_note(here, capsys):
    write(here / "mine.jsonl", GOOD)
    assert main(["audit", "mine.jsonl", "--write_clean", "mine.jsonl"]) == 2
    assert capsys.readouterr().err == "error: write_clean='mine.jsonl' exists: name a new file\n"
    assert main(["audit", "mine.jsonl", "--tests", "./nowhere.jsonl"]) == 0
    assert "note: not compared with ./nowhere.jsonl: " in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "\n\n", '{"problem": "Why?"}\n', "no JSON\n"])
def test_a_file_without_a_row_that_can_be_read_is_one_line(content, here, capsys):
    (here / "mine.jsonl").write_text(content)
    assert main(["audit", "mine.jsonl", "--tests", ""]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "mine.jsonl" in err


@pytest.mark.parametrize(
    ("split", "compared"), [("test", ["math500"]), ("train[:9]", ["gsm8k", "math500"]), ("train", ["gsm8k", "math500"])]
)
def test_a_test_set_is_not_compared_with_itself(split, compared, monkeypatch):
    loaded = []
    monkeypatch.setattr(audit, "load_problems", lambda name, *_, **__: loaded.append(name) or [])
    settings = SimpleNamespace(dataset="gsm8k", dataset_split=split)
    assert [*audit.overlap_faults([], "gsm8k, math500", settings, [])] == []
    assert loaded == compared


def test_a_gold_answer_of_a_third_of_the_problems_is_reported(here, capsys):
    write(here / "mine.jsonl", [(problem, "yes" if i % 3 == 0 else gold) for i, (problem, gold) in enumerate(GOOD)])
    code, result = audited(capsys)
    assert (code, result["most_common"], result["left_out"]) == (1, {"answer": "yes", "count": 4}, 0)


def test_doctor_prints_one_line_and_refuses_a_tenth_of_gold_answers_that_nobody_can_match(here):
    from grpo_math.checks import audit
    from grpo_math.checks.setup import Setup
    from grpo_math.settings.recipe import read

    write(here / "mine.jsonl", GOOD)
    settings = read(["--dataset", "mine.jsonl", "--eval_n", "0"])
    assert [*audit.check(Setup(settings))] == []
    write(here / "mine.jsonl", [*GOOD, ("Which one?", "B"), REPEATED])
    (finding,) = audit.check(Setup(settings))
    assert (
        finding.message
        == "data: 1 multiple-choice letters, 1 near-duplicate problems; grpo-math audit RECIPE shows them"
    )
    lost = [("Why?", "because the sum of both is even"), ("And what?", "See the proof above, and add the cases.")]
    write(here / "mine.jsonl", [*GOOD, *lost])
    error, _ = audit.check(Setup(settings))
    message = "2 of 14 gold answers are not values that an answer can match; the first is 'because the sum of both"
    assert (error.level, error.message[: len(message)]) == ("error", message)
    write(here / "mine.jsonl", [(problem, ("9", "9.0")[i % 2]) for i, (problem, _) in enumerate(GOOD)])
    (warning,) = audit.check(Setup(settings))
    assert (warning.level, warning.message[:35]) == ("warning", "12 of 12 gold answers are '9', so a")
    write(here / "mine.jsonl", [*GOOD, lost[0]])
    assert [finding.level for finding in audit.check(Setup(settings))] == ["info"]

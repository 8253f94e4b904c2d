"""Report a column that is missing, with the line to paste: which column is which, by the names of the columns.

>>> from grpo_math.problems.columns import ACCEPTED
>>> row = {"Nr": 1, "Frage": "Wie viel sind 40 + 53 Euro?", "Loesung": "93 Euro", "answer_type": "integer"}
>>> column_remedy([row], "problem", ACCEPTED)
'its columns are Nr, Frage, Loesung, answer_type; give --columns problem=Frage,answer=Loesung'

A column with another name is not offered: a number may be an answer, an id or a count. columns.py has the common names,
which need no guess.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from numbers import Number
from shlex import quote
from statistics import fmean
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.grading.vocabulary import words
from grpo_math.grading.where import gold_answer
from grpo_math.problems.columns import Columns, used
from grpo_math.problems.parts import belongs
from grpo_math.settings.data import columns_as_text
from grpo_math.system.reading import from_cell

SEEN = 50  # rows that are read for a guess
SENTENCE = 10  # characters of a problem
# A number, a letter of an option, or a formula, and not a sentence or a label.
VALUE = re.compile(r"\W*[A-Ja-j]\W*|[①-⑩]|(?=.*[\d\\]).{1,40}")
# Members of a series of columns: option_a, step 2.
MEMBER = re.compile(r".*[\s_-][A-Ja-j]|.*\d|.")


def _folded(name: str) -> str:
    """Return the words of a column's name in small letters without accents.

    >>> _folded("lSolutions"), _folded("Réponse-correcte")
    ('l solutions', 'reponse correcte')
    """
    letters = (c for c in unicodedata.normalize("NFD", name) if unicodedata.category(c) != "Mn")
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", unicodedata.normalize("NFC", "".join(letters)))
    return " ".join(re.split(r"[\s_.:/-]+", spaced.casefold().strip()))


def _pattern(names: str, *phrases: str) -> re.Pattern[str]:
    """Return a pattern for names with one of these words. Scripts from Thai on do not separate words."""
    every = sorted(map(_folded, {*names.split(), *phrases}), reverse=True)
    spaced = "|".join(word for word in every if word < "\u0e00")
    return re.compile("|".join([rf"(?<!\S)(?:{spaced})s?(?!\S)", *(word for word in every if word >= "\u0e00")]))


# Names in the languages of grading/vocabulary.json.
PROBLEM_NAMES = _pattern(
    """
    question problem exercise frage aufgabe aufgabentext aufgabenstellung pergunta questão enunciado problema ejercicio
    pregunta exercício énoncé problème exercice domanda esercizio quesito testo vraag opgave pytanie zadanie вопрос
    задача задание питання soru fråga uppgift spørgsmål oppgave kysymys tehtävä otázka úloha kérdés feladat întrebare
    pertanyaan soal swali ερώτηση πρόβλημα سؤال السؤال مسألة שאלה سوال प्रश्न প্রশ্ন คำถาม โจทย์ 问题 問題 题目 題目 题干
    質問 設問 문제 질문
    """,
    "câu hỏi",
    "đề bài",
)
ANSWER_NAMES = _pattern(
    """
    answer ans gold solution gabarito correta correcta lösung loesung ergebnis antwort solución solução corrigé réponse
    soluzione oplossing rozwiązanie wynik решение řešení lösning løsning ratkaisu çözüm resultado résultat risultato
    答案 正解 解答 答え 回答 정답 해답
    """,
    *(word for word in words("answer") if len(word) > 1 and not re.search('[:="]| (?:is|are)', word)),
)
# Such a column says something about a problem or an answer.
ABOUT = _pattern("""
    id uuid index idx nr no type kind format source url lang language unit status len length count time date level score
    difficulty rate model analysis explanation rationale process step point
""")


def refuse_missing(dataset: str, rows: Sequence[Mapping[str, Any]], columns: Columns) -> None:
    """Raise `ConfigError` if no column of these rows is the problem's, or none is the gold answer's."""
    for field in ("problem", "answer"):
        if not used(rows[0], {field: columns[field]}):
            raise ConfigError("dataset", dataset, f"has no column for the {field}", column_remedy(rows, field, columns))


def column_remedy(rows: Sequence[Mapping[str, Any]], field: str, columns: Columns) -> str:
    """Return the remedy for rows that lack a field: the line to paste, or the accepted names without a guess."""
    texts: dict[str, list[str]] = {}
    for row in rows[:SEEN]:
        outer = {name: from_cell(cell) for name, cell in row.items()}
        mappings = [(name, some) for name, some in outer.items() if isinstance(some, dict)]
        inner = {f"{name}.{key}": cell for name, some in mappings for key, cell in some.items()}
        for name, cell in {**outer, **inner}.items():
            cells = [str(one) for one in (cell if isinstance(cell, list) else [cell]) if isinstance(one, str | Number)]
            if text := ", ".join(cells).strip():
                texts.setdefault(name, []).append(text)
    names = {name: _folded(name) for name in texts if not (belongs(name) or MEMBER.fullmatch(name))}
    free = [name for name, words in names.items() if not (ABOUT.search(words) or used([name], columns))]
    length = {name: fmean(map(len, texts[name])) for name in free}
    fits = {name: fmean(bool(VALUE.fullmatch(gold_answer(text))) for text in texts[name]) > 0.5 for name in free}
    answers = {name: match for name in free if (match := ANSWER_NAMES.search(names[name]))}
    candidates = {
        "problem": [name for name in free if PROBLEM_NAMES.search(names[name]) and length[name] >= SENTENCE],
        "answer": [name for name, match in answers.items() if fits[name] or match[0] == names[name]],
    }
    # A problem is long, and an answer is short.
    rank = {name: (fits[name], -length[name]) for name in free}
    missing = [one for one in candidates if candidates[one] and not used(texts, {"": columns[one]})]
    guessed = {one: (min if one == "problem" else max)(candidates[one], key=rank.__getitem__) for one in missing}
    present = ", ".join(map(str, rows[0]))
    if field in guessed:
        text = columns_as_text(guessed) or ""
        word = text if re.fullmatch(r"[\w.,=+-]+", text) else quote(text)
        return f"its columns are {present}; give --columns {word}"
    return f"its columns are {present}; accepted are {', '.join(columns[field])}; name another one with --columns"

"""Report a column that is missing, with the line to paste: which column is which, by the names of the columns.

>>> from grpo_math.problems.columns import ACCEPTED
>>> row = {"Nr": 1, "Frage": "Wie viel sind 40 + 53 Euro?", "Loesung": "93 Euro", "answer_type": "integer"}
>>> column_remedy([row], "problem", ACCEPTED)
'its columns are Nr, Frage, Loesung, answer_type; give --columns problem=Frage,answer=Loesung'

A column with another name is not offered, nor one of two that fit: a number may be an answer, an id or a count.
columns.py has the common names, which need no guess.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.grading.vocabulary import words
from grpo_math.problems.columns import ABOUT, Columns, used
from grpo_math.problems.parts import belongs
from grpo_math.settings.data import columns_as_text
from grpo_math.system.reading import from_cell

SEEN = 50  # rows that are read for a guess
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
    folded = sorted(map(_folded, {*names.split(), *phrases}), reverse=True)
    spaced = "|".join(word for word in folded if word < "\u0e00")
    return re.compile("|".join([rf"(?<!\S)(?:{spaced})s?(?!\S)", *(word for word in folded if word >= "\u0e00")]))


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
ABOUT_NAMES = _pattern(" ".join(ABOUT))


def refuse_missing(dataset: str, rows: Sequence[Mapping[str, Any]], columns: Columns) -> None:
    """Raise `ConfigError` if no column of these rows is the problem's, or none is the gold answer's."""
    for field in ("problem", "answer"):
        if not used(rows[0], {field: columns[field]}):
            raise ConfigError("dataset", dataset, f"has no column for the {field}", column_remedy(rows, field, columns))


def column_remedy(rows: Sequence[Mapping[str, Any]], field: str, columns: Columns) -> str:
    """Return the remedy for rows that lack a field: the line to paste, or the accepted names without a guess."""
    names: dict[str, None] = {}
    for name, content in (cell for row in rows[:SEEN] for cell in row.items()):
        cell = from_cell(content)
        names |= dict.fromkeys([f"{name}.{key}" for key in cell] if isinstance(cell, dict) else [name])
    free = [
        name for name in names if not (belongs(name) or MEMBER.fullmatch(name) or ABOUT_NAMES.search(_folded(name)))
    ]
    guessed = {}
    for one, pattern in (("problem", PROBLEM_NAMES), ("answer", ANSWER_NAMES)):
        candidates = [name for name in free if pattern.search(_folded(name)) and not used([name], columns)]
        # If two columns fit, their names do not decide between them.
        if len(candidates) == 1 and not used(names, {"": columns[one]}):
            guessed[one] = candidates[0]
    present = ", ".join(map(str, rows[0]))
    if field in guessed:
        text = columns_as_text(guessed) or ""
        word = text if re.fullmatch(r"[\w.,=+-]+", text) else quote(text)
        return f"its columns are {present}; give --columns {word}"
    return f"its columns are {present}; accepted are {', '.join(columns[field])}; name another one with --columns"

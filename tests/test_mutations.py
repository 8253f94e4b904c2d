"""The list of mutations fits the code: each text stands once in its file, stays Python when broken, names tests."""

from __future__ import annotations

import ast
import re

from benchmarks.mutations import ROOT, mutations


def test_every_old_text_stands_once_in_its_file_and_the_broken_file_is_python():
    wrong = []
    for one in mutations():
        text = (ROOT / one.file).read_text(encoding="utf-8")
        if text.count(one.old) != 1:
            wrong.append(f"{one.file}: {one.old!r} stands there {text.count(one.old)} times")
            continue
        assert one.old != one.new, one
        ast.parse(text.replace(one.old, one.new), one.breaks)
    assert not wrong, "\n".join(wrong)


def test_every_test_that_is_named_is_there():
    for one in mutations():
        assert one.tests, one
        for name in one.tests:
            path, _, test = name.partition("::")
            text = (ROOT / path).read_text(encoding="utf-8")
            assert not test or re.search(rf"^def {re.escape(test.partition('[')[0])}\(", text, re.MULTILINE), name


def test_there_are_at_least_150_and_none_twice():
    keys = [one.key for one in mutations()]
    assert len(set(keys)) == len(keys) >= 150

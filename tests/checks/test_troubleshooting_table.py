"""The troubleshooting tables: a row for every check and every finding, and no other texts than theirs."""

from __future__ import annotations

import json

from grpo_math.checks import table
from grpo_math.checks.diagnosis import CHECKS as FINDINGS
from grpo_math.checks.preflight import CHECKS, WITH_TOKENIZER
from grpo_math.cli import main


def test_every_check_says_what_has_to_hold_in_a_sentence():
    assert [row["check"] for row in table.before()] == [*CHECKS, *WITH_TOKENIZER]
    for row in table.before():
        assert row["what has to hold"].endswith("."), row


def test_every_finding_has_a_symptom_a_cause_and_a_remedy():
    assert [row["finding"] for row in table.during()] == list(FINDINGS)
    assert all(all(row.values()) for row in table.during())


def test_the_command_prints_both_and_takes_nothing_else(capsys):
    assert main(["doctor", "--table"]) == 0
    assert capsys.readouterr().out == f"{table.markdown(table.before())}\n\n{table.markdown(table.during())}\n"
    assert main(["doctor", "--table", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"before": table.before(), "during": table.during()}

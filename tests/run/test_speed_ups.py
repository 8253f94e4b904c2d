"""A speed-up that is off says so: one line for each reason."""

import ast
import json
import logging
from pathlib import Path

import grpo_math
from grpo_math.run import speed_ups
from grpo_math.run.speed_ups import SPEED_UPS, switched_off


def test_every_reason_in_the_code_is_that_of_a_speed_up_in_the_table_and_every_speed_up_has_one():
    texts = [file.read_text(encoding="utf-8") for file in Path(grpo_math.__file__).parent.rglob("*.py")]
    nodes = [node for text in texts if "switched_off(" in text for node in ast.walk(ast.parse(text))]
    calls = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "switched_off"]
    assert {ast.literal_eval(call.args[0]) for call in calls} == set(SPEED_UPS)


def test_a_reason_is_logged_once_for_each_trainer_and_only_by_the_main_process(caplog, monkeypatch, tmp_path):
    speed_ups.forget()
    with caplog.at_level(logging.WARNING):
        for reason in ("sinks", "sinks", "a softcap"):
            switched_off("packing", reason)
        monkeypatch.setenv("RANK", "1")
        switched_off("prefetch", "a batch differed")
    assert [record.message for record in caplog.records] == [
        f"Switched off: packing: {reason}; rows are scored unpacked." for reason in ("sinks", "a softcap")
    ]
    file = tmp_path / speed_ups.FILE
    speed_ups.write(tmp_path)
    reasons = {"packing": ["sinks", "a softcap"], "prefetch": ["a batch differed"]}
    assert json.loads(file.read_text()) == {"switched_off": reasons}
    speed_ups.forget()
    speed_ups.write(tmp_path)
    assert not file.exists(), "the reasons of an earlier run"

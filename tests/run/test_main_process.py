"""What the main process does for all: the others wait for it, however long, and learn what came of it."""

from __future__ import annotations

import json

import pytest
from launching import ROOT, TORCHRUN, run


@pytest.mark.full
def test_work_longer_than_a_collective_may_take_and_any_error_reach_every_process(tmp_path):
    run([*TORCHRUN, str(ROOT / "tests/processes/on_main.py"), str(tmp_path)])
    main, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    refused = "UserError: this cannot be"
    assert main == [[1, 2], refused, "KeyError: 'nothing there'", "on"]
    assert other == [[1, 2], refused, "RuntimeError: on the main process: KeyError: 'nothing there'", "on"]

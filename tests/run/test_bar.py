"""Progress in a log file: a line a minute and the last, without control characters."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tqdm import tqdm

from grpo_math.run import bar
from grpo_math.run.log import Progress


def test_a_log_gets_a_line_a_minute_and_the_last(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(bar.time, "monotonic", lambda: now[0])
    with bar.Bar(total=10, desc="training") as progress:
        for _ in range(10):
            now[0] += 25.0
            progress.update()
            progress.refresh()
            tqdm.write("a line of its own")
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert [line[:14] for line in lines] == [f"training: {n:3}%" for n in (30, 60, 90, 100)]
    assert "\r" not in "".join(lines)


@pytest.mark.parametrize(("accuracy", "shown"), [(0.25, "accuracy=0.25, reward=0.50"), (0.5, "reward=0.50")])
def test_the_bar_has_room_at_80_columns_and_says_nothing_twice(accuracy, shown, monkeypatch):
    progress, state = Progress(), SimpleNamespace(is_world_process_zero=True, max_steps=1000, global_step=0)
    progress.then = 31.0  # seconds
    progress.on_train_begin(None, state, None)
    state.global_step = 500
    progress.on_step_end(None, state, None)
    progress.on_log(None, state, None, logs={"loss": 0.0, "accuracy": accuracy, "reward": 0.5})
    progress.bar.start_t -= 3700
    line = tqdm.format_meter(**{**progress.bar.format_dict, "ncols": 80})
    progress.bar.close()
    assert len(line) <= 80
    assert len(line.split("|")[1]) >= 8
    assert f"[1:01:40<1:02:11, {shown}]" in line  # the time left: 500 steps and the evaluation that follows

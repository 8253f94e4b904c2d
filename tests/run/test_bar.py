"""Progress in a log file: a line a minute and the last, without control characters."""

from __future__ import annotations

from tqdm import tqdm

from grpo_math.run import bar


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
    assert len(lines) == 4, lines
    assert lines[-1].startswith("training: 100%")
    assert "\r" not in "".join(lines)

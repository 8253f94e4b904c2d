"""What is drawn of a history, where a point says its value, and the progress of a run."""

import re

import pytest
from matplotlib.figure import Figure
from synthetic_run import results

from grpo_math.evaluation.stats import wilson
from grpo_math.report import plots
from grpo_math.report.plots import PLOTS, Curve, curve, curves, png, svg
from grpo_math.report.progress import Progress, progress, spent
from grpo_math.report.run_dir import Run

ACCURACY, REWARD = PLOTS[:2]


def test_the_reward_functions_are_curves_of_the_reward_if_there_are_several():
    lines = [{"step": 1, "reward": 1.5, "rewards/gsm8k/mean": 1.0, "rewards/length/mean": 0.5}]
    assert [line.label for line in curves(lines, REWARD)] == ["reward", "gsm8k", "length"]
    del lines[0]["rewards/length/mean"]
    assert [line.label for line in curves(lines, REWARD)] == ["reward"]


def test_held_out_sets_are_curves_of_the_accuracy_beside_the_default_set():
    lines = [{"step": 2, "eval_aime_accuracy": 0.5}, {"step": 4, "heldout/accuracy": 0.5, "eval_sums_accuracy": 0.5}]
    assert [(line.label, line.steps) for line in curves(lines, ACCURACY)] == [("held-out problems", [4]), ("aime", [2])]


def test_the_evaluation_after_training_replaces_a_smaller_one_of_its_step():
    lines = [{"step": 9, "heldout/accuracy": right / n, "heldout/n": n} for right, n in ((14, 16), (190, 256))]
    assert curves(lines, ACCURACY) == [Curve("held-out problems", [9], [190 / 256], [256])]
    del lines[1]["heldout/n"]
    assert curve([{"step": 1, **lines[0]}, {**lines[1], "step": 10}], "heldout/accuracy", "").n == []


def test_the_pointer_shows_the_step_and_the_value_of_a_point():
    lines = [{"step": s, "accuracy": s / 10, **({"heldout/accuracy": 0.5} if s == 3 else {})} for s in range(1, 6)]
    figure = svg(ACCURACY, curves(lines, ACCURACY))
    shown = [(label, step, value) for _, _, label, step, value in figure["points"]]
    assert shown == [*(("training completions", s, s / 10) for s in range(1, 6)), ("held-out problems", 3, 0.5)]
    drawn = re.findall(r'<use xlink:href="[^"]*" x="([\d.]+)" y="([\d.]+)"', figure["inside"])
    places = [(float(x), float(y)) for x, y in drawn]
    for x, y, *_ in figure["points"]:  # above the marker of matplotlib
        assert any(abs(x - across) < 0.01 and abs(y - down) < 0.01 for across, down in places)
    assert "<svg" not in figure["inside"]
    assert "<g id" not in figure["inside"], "each figure has the same ids"
    steps = [float(step) for step in range(1000)]
    assert len(svg(REWARD, [Curve("reward", steps, steps, [])])["points"]) == 167  # a sixth


@pytest.fixture
def drawn(monkeypatch):
    """Draw plots, and return the axes of each."""
    axes = []
    add = Figure.add_subplot
    monkeypatch.setattr(Figure, "add_subplot", lambda *given: axes.append((add(*given), given[1:])) or axes[-1][0])

    def draw(*figures):
        del axes[:]
        assert png(figures).startswith(b"\x89PNG")
        return [one for one, _ in axes], [place for _, place in axes]

    return draw


def test_a_few_points_have_markers_and_intervals_and_many_a_moving_average(drawn):
    few, many = [1, 2, 3], list(range(40))
    [axes], places = drawn((ACCURACY, [Curve("held out", few, [0.5, 0.25, 1.0], [4, 4, 4])]))
    intervals, line = axes.lines[:3], axes.lines[3]
    ends = [tuple(one.get_ydata()) for one in intervals]
    assert ends == [wilson(2, 4), wilson(1, 4), wilson(4, 4)]
    assert (line.get_marker(), list(line.get_ydata())) == ("o", [0.5, 0.25, 1.0])
    assert (axes.get_ylim(), axes.get_xlabel(), axes.get_ylabel()) == ((0, 1.02), "optimizer step", "share")
    assert axes.yaxis.get_major_formatter()(0.125, 0) == "12.5%"
    assert places == [(1, 1, 1)]
    [axes, _, other], places = drawn(
        (REWARD, [Curve("reward", many, [i % 2 for i in many], [])]),
        (REWARD, [Curve("reward", range(41), range(41), [1] * 41)]),
        (ACCURACY, [Curve("a", few, [0.01] * 3, [])]),
    )
    raw, line = axes.lines
    assert (list(raw.get_ydata())[:2], line.get_marker()) == ([0, 1], "")
    assert list(line.get_ydata())[:4] == plots.smoothed([i % 2 for i in many])[:4] == [1 / 3, 0.5, 0.4, 0.6]
    assert axes.get_xlabel() == "optimizer step; thick: moving average"
    assert axes.get_ylim()[0] <= 0 < axes.get_ylim()[1] < 1.1
    assert other.get_ylim() == (0, 0.05)
    assert places == [(2, 2, 1), (2, 2, 2), (2, 2, 3)]


def test_the_steps_of_a_run_of_epochs_follow_from_its_epoch(tmp_path):
    history = [{"step": 10, "epoch": 0.5, "step_time": 3.0}]
    run = Run(tmp_path, config={"max_steps": -1, "num_train_epochs": 3.0}, history=history)
    assert progress(run) == Progress(10, 60, 150.0)
    assert progress(Run(tmp_path)) == Progress(0, None, None)
    # The pace of the ten newest lines: the first, with the compilation, is not one of them.
    slow = [{"step": s, "step_time": 100.0 if s == 1 else 2.0} for s in range(1, 12)]
    assert progress(Run(tmp_path, {"max_steps": 15}, slow)) == Progress(11, 15, 8.0)
    assert progress(Run(tmp_path, {"max_steps": 11}, slow)).left is None
    assert spent(Run(tmp_path, {}, slow, results({0}, n=1))) == {"other": 120.0, "evaluation": 12.5}

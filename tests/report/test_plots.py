"""What is drawn of a history, where a point says its value, and the progress of a run."""

import re

import pytest
from matplotlib.figure import Figure
from synthetic_run import evaluation

from grpo_math.evaluation.stats import wilson
from grpo_math.report.plots import PLOTS, Curve, curves, png, smoothed, svg
from grpo_math.report.progress import Progress, progress
from grpo_math.report.run_dir import RunDir

ACCURACY, REWARD = PLOTS[:2]


@pytest.fixture
def drawn(monkeypatch):
    """Draw plots as one image, and return its figure."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *given, **more: figures.append(figure))

    def draw(*plots):
        png(plots)
        return figures.pop()

    return draw


ONE = {"step": 1, "reward": 1.5, "rewards/gsm8k/mean": 1.0}
DEFAULT_SET = {"step": 4, "heldout/accuracy": 0.5, "eval_sums_accuracy": 0.5}
SMALL, LARGE = ({"step": step, "heldout/accuracy": 0.75, "heldout/n": n} for step, n in ((5, 16), (9, 64)))


@pytest.mark.parametrize(
    ("plot", "lines", "expected"),
    [
        pytest.param(REWARD, [ONE], [Curve("reward", [1], [1.5], [])], id="one reward function is the reward"),
        pytest.param(
            REWARD,
            [{**ONE, "rewards/length/mean": 0.5}],
            [Curve("reward", [1], [1.5], []), Curve("gsm8k", [1], [1.0], []), Curve("length", [1], [0.5], [])],
            id="several reward functions have their own curves",
        ),
        pytest.param(
            ACCURACY,
            [{"step": 2, "eval_aime_accuracy": 0.25}, DEFAULT_SET],
            [Curve("held-out problems", [4], [0.5], []), Curve("aime", [2], [0.25], [])],
            id="held-out sets beside the default set",
        ),
        pytest.param(
            ACCURACY,
            [SMALL, LARGE, {"step": 9, "eval_aime_accuracy": 0.5, "eval_aime_n": 30}],
            [
                Curve("held-out problems, n = 16 and 64", [5, 9], [0.75, 0.75], [16, 64]),
                Curve("aime, n = 30", [9], [0.5], [30]),
            ],
            id="the number of problems",
        ),
        pytest.param(
            ACCURACY,
            [DEFAULT_SET, SMALL],
            [Curve("held-out problems", [4, 5], [0.5, 0.75], [])],
            id="no intervals where the number of problems is not known",
        ),
    ],
)
def test_each_metric_of_a_plot_is_a_curve(plot, lines, expected):
    assert curves(lines, plot) == expected


def test_the_pointer_shows_the_step_and_the_value_of_a_point():
    lines = [{"step": s, "accuracy": s / 10, **({"heldout/accuracy": 0.5} if s == 3 else {})} for s in range(1, 6)]
    figure = svg(ACCURACY, curves(lines, ACCURACY))
    assert [(label, step, value) for _, _, label, step, value in figure["points"]] == [
        *(("training completions", s, s / 10) for s in range(1, 6)),
        ("held-out problems", 3, 0.5),
    ]
    drawn = re.findall(r'<use xlink:href="[^"]*" x="([\d.]+)" y="([\d.]+)"', figure["inside"])
    markers = [pytest.approx((float(x), float(y)), abs=0.01) for x, y in drawn]
    assert all((x, y) in markers for x, y, *_ in figure["points"])
    assert "<svg" not in figure["inside"]
    assert "<g id" not in figure["inside"], "each figure has the same ids"
    steps = [float(step) for step in range(1000)]
    assert len(svg(REWARD, [Curve("reward", steps, steps, [])])["points"]) == 167  # a sixth


def test_an_image_is_a_png():
    assert png([(REWARD, [Curve("reward", [1], [1.0], [])])]).startswith(b"\x89PNG")


def test_a_few_points_have_markers_and_intervals_and_many_a_moving_average(drawn):
    few, many = [1, 2, 3], list(range(40))
    [axes] = drawn((ACCURACY, [Curve("held out", few, [0.5, 0.25, 1.0], [4, 4, 4])])).axes
    [line], [band] = axes.lines, axes.collections
    assert {*band.get_paths()[0].vertices[:, 1]} == {*wilson(2, 4), *wilson(1, 4), *wilson(4, 4)}
    assert (line.get_marker(), list(line.get_ydata())) == ("o", [0.5, 0.25, 1.0])
    assert axes.get_ylim()[0] == 0, "or a small change would look like a large one"
    assert axes.yaxis.get_major_formatter()(0.125, 0) == "12.5%"
    [axes] = drawn((REWARD, [Curve("reward", many, [i % 2 for i in many], [])])).axes
    raw, line = axes.lines
    assert (list(raw.get_ydata())[:2], line.get_marker()) == ([0, 1], "")
    assert list(line.get_ydata())[:4] == smoothed([i % 2 for i in many])[:4] == [1 / 3, 0.5, 0.4, 0.6]
    assert "moving average" in axes.get_xlabel()


# The pace of the ten newest lines counts: the first, with the compilation, is not one of them.
SLOW = [{"step": step, "step_time": 100.0 if step == 1 else 2.0} for step in range(1, 12)]


@pytest.mark.parametrize(
    ("config", "history", "expected"),
    [
        (
            {"max_steps": -1, "num_train_epochs": 3.0},
            [{"step": 10, "epoch": 0.5, "step_time": 3.0}],
            Progress(10, 60, 150.0),
        ),
        ({}, [], Progress(0, None, None)),
        ({"max_steps": 15}, SLOW, Progress(11, 15, 8.0)),
        ({"max_steps": 11}, SLOW, Progress(11, 11, None)),
    ],
)
def test_the_steps_of_a_run_and_the_time_that_is_left(config, history, expected, tmp_path):
    assert progress(RunDir(tmp_path, config, history)) == expected


def test_points_of_the_same_number_of_problems_are_joined_except_before_and_after(drawn):
    ends = [(0, evaluation(range(8), 32)), (6, evaluation(range(24), 32))]
    history = [{"step": step, "heldout/accuracy": 0.5, "heldout/n": 64} for step in (2, 4)]
    [axes] = drawn((ACCURACY, curves(history, ACCURACY, ends))).axes
    lines = [(line.get_xdata().tolist(), line.get_linestyle()) for line in axes.get_lines()]
    assert lines == [([2, 4], "-"), ([0, 6], "None")]
    band, intervals = axes.collections
    assert {*band.get_paths()[0].vertices[:, 1]} == {*wilson(32, 64)}
    assert [tuple(path.vertices[:, 1]) for path in intervals.get_paths()] == [wilson(8, 32), wilson(24, 32)]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "held-out problems, n = 64",
        "before and after training, n = 32",
    ]

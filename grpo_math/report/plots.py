"""A run's history -> panels, as PNG figures for the folder and as inline SVG for the page.

Each panel is a title, the metrics that it shows and one drawing function; names, units and meanings come from
`run.metrics`. matplotlib is imported where it is used and through its object interface: pyplot's global state,
and with it the caller's own figures, stays untouched.

Does not read files and does not write them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup

from grpo_math.evaluation.compare import count, share
from grpo_math.evaluation.stats import wilson
from grpo_math.report.run_dir import History, Run
from grpo_math.run import metrics
from grpo_math.run.metrics import RIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which the colour-blind can tell apart, and three greys; the page has a CSS variable for each.
CSS_COLOURS = {"#0072b2": "blue", "#d55e00": "orange", "#009e73": "green", "#aa4499": "purple"}
CSS_COLOURS |= {"#1b1f24": "ink", "#57606b": "muted", "#d9dee3": "grid"}
BLUE, ORANGE, GREEN, PURPLE, INK, MUTED, GRID = CSS_COLOURS
MOST_POINTS = 500
TITLE: dict[str, Any] = {"loc": "left", "fontsize": 12, "fontweight": "bold", "color": INK, "pad": 24}
LEGEND = {"borderpad": 0, "borderaxespad": 0.5, "handlelength": 1.2, "handletextpad": 0.5, "columnspacing": 1.2}


class Panel(NamedTuple):
    """One plot: its title, the metrics that it shows as (key, label, colour), and the function that draws it."""

    title: str
    lines: tuple[tuple[str, str, str], ...]
    draw: Callable[[Axes, Run, Panel], None]


def _series(history: History, *keys: str) -> list[list[float]]:
    """Return the steps that have all of these metrics, and the values of each."""
    rows = [row for row in history if all(key in row for key in keys)]
    return [[row[key] for row in rows] for key in (metrics.STEP, *keys)]


def condensed(run: Run) -> Run:
    """Return the run with at most `MOST_POINTS` rows of history, for drawing: a row then stands for several steps.

    Values are averaged over those steps, but the longest completion stays the longest.
    """
    size = -(-len(run.history) // MOST_POINTS)
    if size <= 1:
        return run
    reduced, rows = {metrics.LENGTH_MAX: max, metrics.STEP: max}, []
    for start in range(0, len(run.history), size):
        part = run.history[start : start + size]
        keys = dict.fromkeys(key for row in part for key in row)
        rows.append({key: reduced.get(key, fmean)([row[key] for row in part if key in row]) for key in keys})
    return replace(run, history=rows)


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """The mean of the ``window`` values around each; fewer at the ends.

    >>> moving_average([0, 3, 6, 0], 3)
    [1.5, 3.0, 3.0, 3.0]
    """
    half = window // 2
    near = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in near]


def window_of(values: Sequence[float]) -> int:
    """Return the number of values that the moving average of a line spans: 1 if there are too few of them.

    >>> window_of([0.5] * 11), window_of([0.5] * 60), window_of([0.5] * 1000)
    (1, 7, 51)
    """
    return min(51, max(3, len(values) // 10) | 1) if len(values) >= 12 else 1


def draw_line(axes: Axes, run: Run, key: str, label: str, colour: str) -> None:
    """Draw a metric of a run over its steps: its values, and thicker their moving average if there are enough."""
    steps, values = _series(run.history, key)
    window = window_of(values)
    if window > 1:
        axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.35)
        axes.plot(steps, moving_average(values, window), color=colour, linewidth=2, label=label)
        axes.set_xlabel(f"optimizer step; thick: {_window_words(steps, window)}")
    elif values:
        marker = "o" if len(values) < 12 else ""
        axes.plot(steps, values, color=colour, linewidth=1.8, marker=marker, markersize=4, label=label)


def _window_words(steps: Sequence[float], window: int) -> str:
    """Say how many steps a window spans. A value stands for several steps if not every step is logged or drawn.

    >>> _window_words([1, 2, 3, 4], 3), _window_words([10, 20, 30, 40], 3)
    ('moving average of 3 steps', 'moving average of 30 steps')
    """
    return f"moving average of {round(window * (steps[-1] - steps[0]) / max(1, len(steps) - 1))} steps"


def _draw_lines(axes: Axes, run: Run, panel: Panel) -> None:
    """Draw each metric of the panel. The axis of a share starts at zero."""
    for line in panel.lines:
        draw_line(axes, run, *line)
    if metrics.METRICS[panel.lines[0][0]].unit == "share":
        axes.set_ylim(bottom=0, top=min(1.02, max(0.05, axes.get_ylim()[1])))


def _draw_accuracy(axes: Axes, run: Run, panel: Panel) -> None:
    training, (key, label, colour) = panel.lines
    draw_line(axes, run, *training)
    steps, values = _series(run.history, key)
    few = len(steps) <= 40
    axes.plot(steps, values, color=colour, linewidth=1.4, marker="o" if few else "", markersize=4, zorder=3)
    for row in run.history if few else ():
        if key in row and (n := row.get(metrics.HELDOUT_N)):
            interval = wilson(row[key] * n, n)
            axes.plot([row[metrics.STEP]] * 2, interval, color=colour, linewidth=1, alpha=0.6, zorder=3)
    for step, results in ((0.0, run.before), (run.history[-1][metrics.STEP], run.after)):
        if results:
            interval = wilson(count(results, *RIGHT), len(results["rows"]))
            axes.plot([step, step], interval, color=colour, linewidth=1.6, zorder=4)
            axes.plot([step], [share(results)], color=colour, marker="D", markersize=6, zorder=5)
    axes.plot([], [], color=colour, linewidth=1.6, marker="D", markersize=6, label=label)
    axes.set_ylim(0, 1.02)


def _draw_phases(axes: Axes, run: Run, panel: Panel) -> None:
    """Draw the seconds of a step, stacked. The time outside any phase comes last, then the step is whole. On top is the
    sampling that went on meanwhile: the step would have waited for it."""
    lines = [line for line in panel.lines if _series(run.history, line[0])[1]]
    steps, *columns = _series(run.history, *(key for key, _, _ in lines))
    window, bottom = min(51, max(1, len(steps) // 10) | 1), [0.0] * len(steps)
    for (key, label, colour), values in zip(lines, columns, strict=True):
        reach = max if key == metrics.SECONDS_STEP else sum
        top = [reach(both) for both in zip(bottom, values, strict=True)]
        below, above = moving_average(bottom, window), moving_average(top, window)
        axes.fill_between(steps, below, above, color=colour, alpha=0.75, linewidth=0, label=label)
        bottom = top
    axes.set_ylim(bottom=0)
    if window > 1:
        axes.set_xlabel(f"optimizer step; {_window_words(steps, window)}")


def _panel(title: str, *lines: tuple[str, str, str], draw: Callable[[Axes, Run, Panel], None] = _draw_lines) -> Panel:
    return Panel(title, lines, draw)


TRAINING = (
    _panel("Average reward", (metrics.REWARD, "reward", BLUE)),
    _panel(
        "Accuracy",
        (metrics.ACCURACY, "training completions", BLUE),
        (metrics.HELDOUT_ACCURACY, "held-out with 95% interval", ORANGE),
        draw=_draw_accuracy,
    ),
    _panel("Completion length", (metrics.LENGTH_MEAN, "mean", BLUE), (metrics.LENGTH_MAX, "longest", ORANGE)),
    _panel(
        "Degenerate groups",
        (metrics.DEGENERATE, "all rewards equal", BLUE),
        (metrics.ALL_RIGHT, "all right", GREEN),
        (metrics.ALL_WRONG, "all wrong", ORANGE),
    ),
)
DETAILS = (
    _panel("KL to the reference", (metrics.KL, "KL", BLUE)),
    _panel("Entropy", (metrics.ENTROPY, "entropy", BLUE)),
    _panel("Truncated completions", (metrics.TRUNCATED, "cut at the limit", BLUE)),
    _panel(
        "Clipped tokens",
        (metrics.CLIP_REGION, "either side", BLUE),
        (metrics.CLIP_LOW, "below", ORANGE),
        (metrics.CLIP_HIGH, "above", GREEN),
    ),
    _panel("Gradient norm", (metrics.GRAD_NORM, "before clipping", BLUE)),
    _panel(
        "Time by phase",
        (metrics.SECONDS_GENERATE, "generation", BLUE),
        (metrics.SECONDS_SYNC, "weights to vLLM", INK),
        (metrics.SECONDS_GRADE, "grading", GREEN),
        (metrics.SECONDS_SCORE, "scoring", PURPLE),
        (metrics.SECONDS_UPDATE, "update", ORANGE),
        (metrics.SECONDS_STEP, "other", MUTED),
        (metrics.SECONDS_OVERLAP, "sampled meanwhile", GRID),
        draw=_draw_phases,
    ),
)


def _draw(axes: Axes, run: Run, panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    unit = metrics.METRICS[panel.lines[0][0]].unit
    axes.set_title(panel.title, **TITLE)
    axes.set_xlabel("optimizer step", fontsize=10, color=MUTED)
    axes.set_ylabel(unit, fontsize=10, color=MUTED)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(colors=MUTED, labelsize=9.5, length=0, pad=5)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))
    if shows(run, panel):
        panel.draw(axes, run, panel)
        if unit == "share":
            axes.yaxis.set_major_formatter(lambda value, _: _figure(value, unit))
        # Between title and plot, where it covers nothing.
        place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "frameon": False, **LEGEND}
        labels = axes.get_legend_handles_labels()[1]
        rows = -(-len(labels) // 4)  # more in one would squeeze the plot
        axes.legend(ncols=-(-len(labels) // rows), fontsize=9.5, labelcolor=MUTED, **place)
        if rows > 1:
            axes.set_title(panel.title, **{**TITLE, "pad": TITLE["pad"] + 16 * (rows - 1)})
    else:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "not logged in this run", ha="center", va="center", color=MUTED, transform=axes.transAxes)


def shows(run: Run, panel: Panel) -> bool:
    ends = any(key == metrics.HELDOUT_ACCURACY for key, _, _ in panel.lines) and bool(run.before or run.after)
    return bool(run.history) and (ends or any(_series(run.history, key)[1] for key, _, _ in panel.lines))


def render(run: Run, panels: Sequence[Panel], kind: str) -> bytes:
    """The panels as one figure, two in a row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    # Inline panels are shrunk to a phone's width, where a smaller figure has the larger letters.
    width, height = (4.8, 3.3) if kind == "svg" else (6, 3.8)
    figure = Figure(figsize=(width * columns, height * rows), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.12))
    FigureCanvasAgg(figure)
    for place, panel in enumerate(panels, start=1):
        _draw(figure.add_subplot(rows, columns, place), run, panel)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=120, transparent=kind == "svg")
    return buffer.getvalue()


def inline_svg(svg: bytes) -> Markup:
    """matplotlib's SVG as part of a page: colours that follow the theme, no prologue, no doubled group ids."""
    text = svg.decode("utf-8")
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r"^<svg [^>]*>", lambda tag: re.sub(r' (?:width|height)="[^"]*"', "", tag[0]), text)
    text = text.replace("<svg ", '<svg aria-hidden="true" ', 1)
    return Markup(re.sub("|".join(CSS_COLOURS), lambda found: f"var(--{CSS_COLOURS[found[0]]})", text))


def _figure(value: float, unit: str) -> str:
    """Return a value with three digits, a share in per cent.

    >>> _figure(0.28125, "share"), _figure(0.5, "nats")
    ('28.1%', '0.5')
    """
    return f"{100 * value:.3g}%" if unit == "share" else f"{value:.3g}"


def captions(run: Run, panel: Panel) -> list[str]:
    """Return a sentence for each line of a panel: its ends, and what the metric means. ``run`` is as it is drawn."""
    sentences = []
    for key, label, _ in panel.lines:
        values, (unit, meaning, _) = _series(run.history, key)[1], metrics.METRICS[key]
        if not values:
            continue
        if key == metrics.HELDOUT_ACCURACY:  # those before and after are elsewhere
            label, window = "held-out while it trains", 1
        else:
            window = window_of(values) if panel.draw in (_draw_lines, _draw_accuracy) else 1
        line = moving_average(values, window)
        average = ", of the moving average" if window > 1 else ""
        ends = f"{_figure(line[0], unit)} at first, {_figure(line[-1], unit)} at last{average}"
        sentences.append(f"{label}: {ends} ({meaning})")
    return sentences

"""A run's history -> panels, as PNG figures for the folder and as inline SVG for the page.

Each panel is a title, the metrics that it shows and one drawing function; names, units and meanings come from
`run.metrics`. matplotlib is imported where it is used and through its object interface: pyplot's global state,
and with it the caller's own figures, stays untouched.

Does not read files and does not write them.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_math.evaluation.compare import count, share
from grpo_math.evaluation.stats import wilson
from grpo_math.report.run_dir import History, Run
from grpo_math.run import metrics
from grpo_math.run.machine import GB
from grpo_math.run.metrics import IN_FORMAT, RIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which the colour-blind can tell apart, and three greys; the page has a CSS variable for each.
CSS_COLOURS = {"#0072b2": "blue", "#d55e00": "orange", "#009e73": "green", "#aa4499": "purple"}
CSS_COLOURS |= {"#1b1f24": "ink", "#57606b": "muted", "#d9dee3": "grid"}
BLUE, ORANGE, GREEN, PURPLE, INK, MUTED, GRID = CSS_COLOURS
MOST_POINTS = 500
TITLE: dict[str, Any] = {"loc": "left", "fontsize": 12, "fontweight": "bold", "color": INK, "pad": 24}
ONE_OR_NONE = ("accuracy", "r1_zero", "gsm8k", "format_strict", "format_soft")  # rewards that are 1 or 0
LEGEND = {"borderpad": 0, "borderaxespad": 0.5, "handlelength": 1.2, "handletextpad": 0.5, "columnspacing": 1.2}


class Panel(NamedTuple):
    """One plot: its title, the metrics that it shows as (key, label, colour), and what draws it."""

    title: str
    lines: tuple[tuple[str, str, str], ...]
    draw: Callable[[Axes, Run, Panel], None]


def _has(row: dict[str, float], *keys: str) -> bool:
    return all(math.isfinite(row.get(key, math.nan)) for key in keys)


def _series(history: History, key: str) -> tuple[list[float], list[float]]:
    rows = [row for row in history if math.isfinite(row.get(key, math.nan))]
    return [row[metrics.STEP] for row in rows], [row[key] for row in rows]


def condensed(run: Run) -> Run:
    """The run with at most `MOST_POINTS` rows of history, for drawing: a row then stands for several steps.

    Values are averaged over those steps, but a smallest value stays the smallest and a largest the largest.
    """
    size = -(-len(run.history) // MOST_POINTS)
    if size <= 1:
        return run
    extreme = {metrics.REWARD_MIN: min, metrics.REWARD_MAX: max, metrics.LENGTH_MAX: max, metrics.STEP: max}
    rows = []
    for start in range(0, len(run.history), size):
        values: dict[str, list[float]] = {}
        for row in run.history[start : start + size]:
            for key, value in row.items():
                if math.isfinite(value):
                    values.setdefault(key, []).append(value)
        rows.append({key: extreme.get(key, fmean)(found) for key, found in values.items()})
    return replace(run, history=rows)


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """The mean of the ``window`` values around each; fewer at the ends.

    >>> moving_average([0, 3, 6, 0], 3)
    [1.5, 3.0, 3.0, 3.0]
    """
    half = window // 2
    near = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in near]


def window_of(key: str, values: Sequence[float]) -> int:
    """Of how many values a metric's line is the moving average: 1 where they are too few, or not noisy.

    >>> window_of("reward", [0.5] * 11), window_of("reward", [0.5] * 60), window_of("reward", [0.5] * 1000)
    (1, 7, 51)
    >>> window_of("memory/resident", [2.0] * 60)
    1
    """
    if metrics.METRICS[key].unit == "bytes":
        return 1
    return min(51, max(3, len(values) // 10) | 1) if len(values) >= 12 else 1


def draw_line(axes: Axes, run: Run, key: str, label: str, colour: str) -> None:
    """A metric of a run over its steps: its values, and thicker their moving average where there are enough."""
    steps, values = _series(run.history, key)
    window = window_of(key, values)
    if window > 1:
        axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.35)
        axes.plot(steps, moving_average(values, window), color=colour, linewidth=2, label=label)
        _say_average(axes, steps, window)
    elif values:
        marker = "o" if len(values) < 12 else ""
        axes.plot(steps, values, color=colour, linewidth=1.8, marker=marker, markersize=4, label=label)


def _say_average(axes: Axes, steps: Sequence[float], window: int) -> None:
    axes.set_xlabel(f"optimizer step; thick: moving average of {_spanned(steps, window)} steps")


def _spanned(steps: Sequence[float], window: int) -> int:
    """Steps that a window of values spans: a value stands for several where not each step is logged or drawn.

    >>> _spanned([1, 2, 3, 4], 3), _spanned([10, 20, 30, 40], 3)
    (3, 30)
    """
    return round(window * (steps[-1] - steps[0]) / max(1, len(steps) - 1))


def _draw_lines(axes: Axes, run: Run, panel: Panel) -> None:
    """A loss with the line at zero, shares and bytes from zero on, with whole or half GB on the axis."""
    from matplotlib.ticker import MaxNLocator

    unit = metrics.METRICS[panel.lines[0][0]].unit
    if unit == "loss":
        axes.axhline(0, color=MUTED, linewidth=0.8)
    for line in panel.lines:
        draw_line(axes, run, *line)
    top = axes.get_ylim()[1]
    if unit == "share":
        axes.set_ylim(bottom=0, top=min(1.02, max(0.05, top)))
    elif unit == "bytes":
        axes.set_ylim(0, 1.05 * top)
        ticks = MaxNLocator(nbins=6).tick_values(0, 1.05 * top / GB)
        axes.set_yticks([GB * tick for tick in ticks if GB * tick <= 1.05 * top])


def _draw_accuracy(axes: Axes, run: Run, panel: Panel) -> None:
    training, (key, label, colour) = panel.lines
    right = RIGHT if key == metrics.HELDOUT_ACCURACY else IN_FORMAT
    draw_line(axes, run, *training)
    steps, values = _series(run.history, key)
    few = len(steps) <= 40
    axes.plot(steps, values, color=colour, linewidth=1.4, marker="o" if few else "", markersize=4, zorder=3)
    for row in run.history if few else ():
        if _has(row, key) and (n := row.get(metrics.HELDOUT_N, 0)):
            interval = wilson(row[key] * n, n)
            axes.plot([row[metrics.STEP]] * 2, interval, color=colour, linewidth=1, alpha=0.6, zorder=3)
    for step, results in ((0.0, run.before), (run.history[-1][metrics.STEP], run.after)):
        if results:
            interval = wilson(count(results, *right), len(results["rows"]))
            axes.plot([step, step], interval, color=colour, linewidth=1.6, zorder=4)
            axes.plot([step], [share(results, right)], color=colour, marker="D", markersize=6, zorder=5)
    axes.plot([], [], color=colour, linewidth=1.6, marker="D", markersize=6, label=label)
    axes.set_ylim(0, 1.02)


def two_rewards(run: Run) -> tuple[float, float] | None:
    """The lower and the higher reward of a run whose completions get one of two, by its completions or its recipe."""
    names = [str(name).rpartition(":")[2] for name in run.config.get("rewards") or ()]
    found = {row.get("reward", row.get(names[0]) if len(names) == 1 else None) for row in run.completions}
    values = {value for value in found if isinstance(value, (int, float)) and math.isfinite(value)}
    if not values and len(names) == 1 and names[0] in ONE_OR_NONE:
        values = {0.0, 1.0}
    if not values:
        return None
    values |= {value for key in (metrics.REWARD_MIN, metrics.REWARD_MAX) for value in _series(run.history, key)[1]}
    return (min(values), max(values)) if len(values) == 2 else None


def _draw_band(axes: Axes, run: Run, panel: Panel) -> None:
    """From the smallest to the largest reward of a step; of two rewards, how many completions got the higher."""
    mean, (low, _, colour), (high, _, _) = panel.lines
    if two := two_rewards(run):
        axes.set_title("Share of the higher reward", **TITLE)
        rows = [{**row, mean[0]: _share_of(row[mean[0]], two)} for row in run.history if _has(row, mean[0])]
        draw_line(
            axes, replace(run, history=rows), mean[0], f"completions that get {two[1]:g} and not {two[0]:g}", colour
        )
        axes.set_ylim(0, 1.02)
        axes.set_ylabel("share", fontsize=10, color=MUTED)
        axes.yaxis.set_major_formatter(lambda value, _: _figure(value, "share"))
        return
    if band := [row for row in run.history if _has(row, low, high)]:
        steps, lows, highs = ([row[key] for row in band] for key in (metrics.STEP, low, high))
        axes.fill_between(steps, lows, highs, color=colour, alpha=0.18, linewidth=0, label="min to max")
    draw_line(axes, run, *mean)


def _share_of(mean: float, two: tuple[float, float]) -> float:
    """
    >>> _share_of(0.5, (0.0, 2.0))
    0.25
    """
    return (mean - two[0]) / (two[1] - two[0])


def _draw_phases(axes: Axes, run: Run, panel: Panel) -> None:
    """Seconds of a step, stacked: after what no phase accounts for the top is the step. Above it is the sampling that
    went on meanwhile: what the step would have waited for."""
    lines = [line for line in panel.lines if _series(run.history, line[0])[1]]
    rows = [row for row in run.history if _has(row, *(key for key, _, _ in lines))]
    window = min(51, max(1, len(rows) // 10) | 1)
    steps, bottom = [row[metrics.STEP] for row in rows], [0.0] * len(rows)
    for key, label, colour in lines:
        reach = max if key == metrics.SECONDS_STEP else sum
        top = [reach((below, row[key])) for below, row in zip(bottom, rows, strict=True)]
        below, above = moving_average(bottom, window), moving_average(top, window)
        axes.fill_between(steps, below, above, color=colour, alpha=0.75, linewidth=0, label=label)
        bottom = top
    axes.set_ylim(bottom=0)
    if window > 1:
        axes.set_xlabel(f"optimizer step; moving average of {_spanned(steps, window)} steps")


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
    _panel("Policy loss", (metrics.LOSS, "loss", BLUE)),
    _panel(
        "Reward range",
        *((metrics.REWARD, "mean", BLUE), (metrics.REWARD_MIN, "min", BLUE), (metrics.REWARD_MAX, "max", BLUE)),
        draw=_draw_band,
    ),
)
DETAILS = (
    _panel(
        "Accuracy in the format",
        (metrics.ACCURACY_IN_FORMAT, "training completions", BLUE),
        (metrics.HELDOUT_IN_FORMAT, "held-out with 95% interval", ORANGE),
        draw=_draw_accuracy,
    ),
    _panel("KL to the reference", (metrics.KL, "KL", BLUE)),
    _panel("Entropy", (metrics.ENTROPY, "entropy", BLUE)),
    _panel("Completion length", (metrics.LENGTH_MEAN, "mean", BLUE), (metrics.LENGTH_MAX, "longest", ORANGE)),
    _panel("Truncated completions", (metrics.TRUNCATED, "cut at the limit", BLUE)),
    _panel(
        "Clipped tokens",
        (metrics.CLIP_REGION, "either side", BLUE),
        (metrics.CLIP_LOW, "below", ORANGE),
        (metrics.CLIP_HIGH, "above", GREEN),
    ),
    _panel(
        "Degenerate groups",
        (metrics.DEGENERATE, "all rewards equal", BLUE),
        (metrics.ALL_RIGHT, "all right", GREEN),
        (metrics.ALL_WRONG, "all wrong", ORANGE),
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
    _panel(
        "Memory",
        (metrics.MEMORY_ALLOCATED, "GPU, tensors", BLUE),
        (metrics.MEMORY_RESERVED, "GPU, held", ORANGE),
        (metrics.MEMORY_RESIDENT, "main memory", GREEN),
    ),
)


def _draw(axes: Axes, run: Run, panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    unit = metrics.METRICS[panel.lines[0][0]].unit
    axes.set_title(panel.title, **TITLE)
    axes.set_xlabel("optimizer step", fontsize=10, color=MUTED)
    axes.set_ylabel("" if unit == "bytes" else unit, fontsize=10, color=MUTED)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(colors=MUTED, labelsize=9.5, length=0, pad=5)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))
    if shows(run, panel):
        panel.draw(axes, run, panel)
        if unit in ("share", "bytes"):
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


def inline_svg(svg: bytes) -> str:
    """matplotlib's SVG as part of a page: colours that follow the theme, no prologue, no doubled group ids."""
    text = svg.decode("utf-8")
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r"^<svg [^>]*>", lambda tag: re.sub(r' (?:width|height)="[^"]*"', "", tag[0]), text)
    text = text.replace("<svg ", '<svg aria-hidden="true" ', 1)
    return re.sub("|".join(CSS_COLOURS), lambda found: f"var(--{CSS_COLOURS[found[0]]})", text)


def _figure(value: float, unit: str) -> str:
    """A value as it is read: shares in per cent, bytes in GB of 2^30.

    >>> _figure(0.28125, "share"), _figure(3 * 2**29, "bytes"), _figure(0.5, "nats")
    ('28.1%', '1.5 GB', '0.5')
    """
    if unit == "share":
        return f"{100 * value:.3g}%"
    return f"{value / GB:.3g} GB" if unit == "bytes" else f"{value:.3g}"


def captions(run: Run, panel: Panel) -> list[str]:
    """What the panel shows in words, a sentence for each line: where it begins and ends, and what it means.

    ``run`` is as it is drawn: of a moving average the ends are its own, with the last value beside them.
    """
    sentences, two = [], two_rewards(run) if panel.draw is _draw_band else None
    for key, label, _ in panel.lines[: 1 if two else None]:
        _, values = _series(run.history, key)
        if not values:
            continue
        unit, meaning, _ = metrics.METRICS[key]
        if two:
            unit, meaning = "share", "every reward is one of the two, so that their range would say nothing"
            label, values = f"get {two[1]:g} and not {two[0]:g}", [_share_of(value, two) for value in values]
        if key in (metrics.HELDOUT_ACCURACY, metrics.HELDOUT_IN_FORMAT):  # those before and after are elsewhere
            label = "held-out while it trains"
        smoothed = panel.draw is not _draw_phases and not key.startswith("heldout/")
        window = window_of(key, values) if smoothed and not _is_edge(panel, key) else 1
        line = moving_average(values, window)
        first, last = (_figure(value, unit) for value in (line[0], line[-1]))
        said = f"{label}: {first} at first, {last} at last"
        if (own := _figure(values[-1], unit)) != last:
            said += f", a moving average; the last value itself is {own}"
        sentences.append(f"{said} ({meaning})")
    return sentences


def _is_edge(panel: Panel, key: str) -> bool:
    """Whether it is an edge of the band, which is drawn as it is."""
    return panel.draw is _draw_band and key != panel.lines[0][0]

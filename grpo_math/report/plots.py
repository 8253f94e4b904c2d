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
from typing import TYPE_CHECKING, NamedTuple

from grpo_math.evaluation.compare import count, share
from grpo_math.evaluation.stats import wilson
from grpo_math.report.run_dir import History, Run
from grpo_math.run import metrics
from grpo_math.run.machine import GB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which the colour-blind can tell apart. The page turns each into a CSS variable.
BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#aa4499"
INK, MUTED, GRID = "#1b1f24", "#57606b", "#d9dee3"
CSS_COLOURS = {
    BLUE: "blue",
    ORANGE: "orange",
    GREEN: "green",
    PURPLE: "purple",
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
}


class Panel(NamedTuple):
    """One plot: its title, the metrics that it shows as (key, label, colour), and what draws it."""

    title: str
    lines: tuple[tuple[str, str, str], ...]
    draw: Callable[[Axes, Run, Panel], None]


def _series(history: History, key: str) -> tuple[list[float], list[float]]:
    points = [(row[metrics.STEP], row[key]) for row in history if math.isfinite(row.get(key, math.nan))]
    return [step for step, _ in points], [value for _, value in points]


MOST_POINTS = 500


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
        block = run.history[start : start + size]
        row = {}
        for key in dict.fromkeys(key for part in block for key in part):
            values = [part[key] for part in block if math.isfinite(part.get(key, math.nan))]
            if values:
                row[key] = extreme.get(key, fmean)(values)
        rows.append(row)
    return replace(run, history=rows)


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """The mean of the ``window`` values around each; fewer at the ends.

    >>> moving_average([0, 3, 6, 0], 3)
    [1.5, 3.0, 3.0, 3.0]
    """
    half = window // 2
    near = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in near]


def _line(axes: Axes, steps: Sequence[float], values: Sequence[float], label: str, colour: str) -> None:
    if len(values) < 12:
        axes.plot(steps, values, color=colour, linewidth=1.8, marker="o", markersize=4, label=label)
        return
    axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.35)
    window = min(51, max(3, len(values) // 10) | 1)
    axes.plot(steps, moving_average(values, window), color=colour, linewidth=2, label=label)


def _draw_lines(axes: Axes, run: Run, panel: Panel) -> None:
    for key, label, colour in panel.lines:
        steps, values = _series(run.history, key)
        if values:
            _line(axes, steps, values, label, colour)
    if metrics.METRICS[panel.lines[0][0]].unit == "share":
        axes.set_ylim(bottom=0, top=min(1.02, max(0.05, axes.get_ylim()[1])))


def _draw_memory(axes: Axes, run: Run, panel: Panel) -> None:
    """Whole or half GB on the axis, from 0."""
    from matplotlib.ticker import MaxNLocator

    _draw_lines(axes, run, panel)
    top = 1.05 * axes.get_ylim()[1]
    axes.set_ylim(0, top)
    ticks = MaxNLocator(nbins=6).tick_values(0, top / GB)
    axes.set_yticks([GB * tick for tick in ticks if GB * tick <= top])


def _draw_loss(axes: Axes, run: Run, panel: Panel) -> None:
    axes.axhline(0, color=MUTED, linewidth=0.8)
    _draw_lines(axes, run, panel)


def _draw_accuracy(axes: Axes, run: Run, panel: Panel) -> None:
    (train_key, train_label, blue), (heldout_key, heldout_label, orange) = panel.lines
    steps, values = _series(run.history, train_key)
    if values:
        _line(axes, steps, values, train_label, blue)
    steps, values = _series(run.history, heldout_key)
    few = len(steps) <= 40
    axes.plot(steps, values, color=orange, linewidth=1.4, marker="o" if few else "", markersize=4, zorder=3)
    for row in run.history if few else ():
        value, n = row.get(heldout_key, math.nan), row.get(metrics.HELDOUT_N, 0)
        if math.isfinite(value) and n:
            axes.plot([row[metrics.STEP]] * 2, wilson(value * n, n), color=orange, linewidth=1, alpha=0.6, zorder=3)
    last = run.history[-1][metrics.STEP]
    for step, results in ((0.0, run.before), (last, run.after)):
        if results:
            lo, hi = wilson(count(results, "correct"), len(results["rows"]))
            axes.plot([step, step], [lo, hi], color=orange, linewidth=1.6, zorder=4)
            axes.plot([step], [share(results)], color=orange, marker="D", markersize=6, zorder=5)
    axes.plot([], [], color=orange, linewidth=1.6, marker="D", markersize=6, label=heldout_label)
    axes.set_ylim(0, 1.02)


def _draw_band(axes: Axes, run: Run, panel: Panel) -> None:
    (mean, label, colour), (low, _, _), (high, _, _) = panel.lines
    band = [row for row in run.history if all(math.isfinite(row.get(key, math.nan)) for key in (low, high))]
    if band:
        steps, lows, highs = ([row[key] for row in band] for key in (metrics.STEP, low, high))
        axes.fill_between(steps, lows, highs, color=colour, alpha=0.18, linewidth=0, label="min to max")
    steps, values = _series(run.history, mean)
    if values:
        _line(axes, steps, values, label, colour)


def _draw_phases(axes: Axes, run: Run, panel: Panel) -> None:
    """Seconds of a step, stacked; what no phase accounts for is drawn last, so that the top is the step."""
    keys = [line for line in panel.lines if _series(run.history, line[0])[1]]
    rows = [row for row in run.history if all(math.isfinite(row.get(key, math.nan)) for key, _, _ in keys)]
    window = min(51, max(1, len(rows) // 10) | 1)
    steps, bottom = [row[metrics.STEP] for row in rows], [0.0] * len(rows)
    for key, label, colour in keys:
        values = [row[key] for row in rows]
        pairs = zip(bottom, values, strict=True)
        top = [max(pair) if key == metrics.SECONDS_STEP else sum(pair) for pair in pairs]
        below, above = moving_average(bottom, window), moving_average(top, window)
        axes.fill_between(steps, below, above, color=colour, alpha=0.75, linewidth=0, label=label)
        bottom = top
    axes.set_ylim(bottom=0)


TRAINING = (
    Panel("Average reward", ((metrics.REWARD, "mean of the step", BLUE),), _draw_lines),
    Panel(
        "Accuracy",
        (
            (metrics.ACCURACY, "training completions", BLUE),
            (metrics.HELDOUT_ACCURACY, "held-out with 95% interval", ORANGE),
        ),
        _draw_accuracy,
    ),
    Panel("Policy loss", ((metrics.LOSS, "loss", BLUE),), _draw_loss),
    Panel(
        "Reward range",
        ((metrics.REWARD, "mean", BLUE), (metrics.REWARD_MIN, "min", BLUE), (metrics.REWARD_MAX, "max", BLUE)),
        _draw_band,
    ),
)
DETAILS = (
    Panel("KL to the reference", ((metrics.KL, "KL", BLUE),), _draw_lines),
    Panel("Entropy", ((metrics.ENTROPY, "entropy", BLUE),), _draw_lines),
    Panel(
        "Completion length", ((metrics.LENGTH_MEAN, "mean", BLUE), (metrics.LENGTH_MAX, "longest", ORANGE)), _draw_lines
    ),
    Panel("Truncated completions", ((metrics.TRUNCATED, "cut at the limit", BLUE),), _draw_lines),
    Panel(
        "Clipped tokens",
        (
            (metrics.CLIP_REGION, "either side", BLUE),
            (metrics.CLIP_LOW, "below", ORANGE),
            (metrics.CLIP_HIGH, "above", GREEN),
        ),
        _draw_lines,
    ),
    Panel(
        "Degenerate groups",
        (
            (metrics.DEGENERATE, "all rewards equal", BLUE),
            (metrics.ALL_RIGHT, "all right", GREEN),
            (metrics.ALL_WRONG, "all wrong", ORANGE),
        ),
        _draw_lines,
    ),
    Panel("Gradient norm", ((metrics.GRAD_NORM, "before clipping", BLUE),), _draw_lines),
    Panel(
        "Time by phase",
        (
            (metrics.SECONDS_GENERATE, "generation", BLUE),
            (metrics.SECONDS_SYNC, "weights to vLLM", INK),
            (metrics.SECONDS_GRADE, "grading", GREEN),
            (metrics.SECONDS_SCORE, "scoring", PURPLE),
            (metrics.SECONDS_UPDATE, "update", ORANGE),
            (metrics.SECONDS_STEP, "other", MUTED),
        ),
        _draw_phases,
    ),
    Panel(
        "Memory",
        (
            (metrics.MEMORY_ALLOCATED, "GPU, tensors", BLUE),
            (metrics.MEMORY_RESERVED, "GPU, held", ORANGE),
            (metrics.MEMORY_RESIDENT, "main memory", GREEN),
        ),
        _draw_memory,
    ),
)


def _draw(axes: Axes, run: Run, panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    unit = metrics.METRICS[panel.lines[0][0]].unit
    axes.set_title(panel.title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=24)
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
        axes.legend(
            ncols=len(axes.get_legend_handles_labels()[1]),
            loc="lower left",
            bbox_to_anchor=(0, 1),
            frameon=False,
            fontsize=9.5,
            labelcolor=MUTED,
            borderpad=0,
            borderaxespad=0.5,
            handlelength=1.2,
            handletextpad=0.5,
            columnspacing=1.2,
        )
    else:
        axes.set_yticks([])
        axes.set_xticks([])
        axes.text(0.5, 0.5, "not logged in this run", ha="center", va="center", color=MUTED, transform=axes.transAxes)


def shows(run: Run, panel: Panel) -> bool:
    ends = panel.draw is _draw_accuracy and bool(run.before or run.after)
    return bool(run.history) and (ends or any(_series(run.history, key)[1] for key, _, _ in panel.lines))


def render(run: Run, panels: Sequence[Panel], kind: str) -> bytes:
    """The panels as one figure, two in a row. The object interface leaves pyplot's global state alone."""
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
    text = re.sub(r'^<svg ([^>]*?)width="[^"]*"', r'<svg aria-hidden="true" \1', text)
    text = re.sub(r'^(<svg [^>]*?)height="[^"]*"', r"\1", text)
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
    """What the panel shows in words, a sentence for each metric: its first and last value, and what it means."""
    sentences = []
    for key, label, _ in panel.lines:
        _, values = _series(run.history, key)
        if values:
            unit, meaning, _ = metrics.METRICS[key]
            first, last = (_figure(value, unit) for value in (values[0], values[-1]))
            if key == metrics.HELDOUT_ACCURACY:  # the two before and after it are the page's headline
                label = "held-out while it trains"
            sentences.append(f"{label}: {first} at first, {last} at last ({meaning})")
    return sentences

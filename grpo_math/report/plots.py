"""Draw the history of one run, or of several, as PNG figures for the folder and as inline SVG for the page.

`PLOTS` is the table of plots. A curve is one line of a plot: its label and its points. matplotlib is imported when it
is used, without pyplot: pyplot's global state, and with it the caller's own figures, stays untouched.
"""

import io
import re
from collections.abc import Sequence
from itertools import cycle
from textwrap import fill
from typing import Any, NamedTuple

from markupsafe import Markup

from grpo_math.evaluation.evaluation import Evaluation
from grpo_math.evaluation.stats import wilson
from grpo_math.report.progress import PHASES
from grpo_math.report.run_dir import History
from grpo_math.run import metrics

# Okabe and Ito's colours, which colour-blind readers can distinguish. The page has a CSS variable for each.
CSS_COLOURS = {
    "#0072b2": "blue",
    "#d55e00": "orange",
    "#009e73": "green",
    "#aa4499": "purple",
    "#1b1f24": "ink",
    "#57606b": "muted",
    "#d9dee3": "grid",
}
COLOURS, GRID = list(CSS_COLOURS)[:6], "#d9dee3"
INK, MUTED = COLOURS[4:]
STYLE: Any = {
    "axes.titlelocation": "left",
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlecolor": INK,
    "axes.labelsize": 11.5,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "lines.linewidth": 1.8,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.fontsize": 11.5,
    "legend.labelcolor": MUTED,
    **{f"{axis}tick.color": MUTED for axis in "xy"},
    **{f"{axis}tick.labelsize": 11.5 for axis in "xy"},
    **{f"{axis}tick.major.size": 0 for axis in "xy"},
    **{f"{axis}tick.major.pad": 5 for axis in "xy"},
}
MOST_MARKERS = 40  # points of a curve that are drawn one by one
MOST_TITLES = 200  # points of a curve that show their step and value to the pointer
LEGEND = 40  # characters in a line of the legend
SMOOTHED = 20  # fewest points for which a moving average is drawn
REWARD_PART = re.compile("rewards/(.+)/mean")


class Plot(NamedTuple):
    """``lines`` are metrics and their labels."""

    title: str
    caption: str
    lines: tuple[tuple[str, str], ...]

    @property
    def unit(self) -> str:
        return metrics.METRICS[self.lines[0][0]].unit


class Curve(NamedTuple):
    """``n`` are the problems behind each point of an accuracy, if they are known. A line joins ``joined`` points."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    n: Sequence[float]
    joined: bool = True


PLOTS = (
    Plot(
        "Accuracy",
        "Share of correct answers in any form, with the 95% interval over the n held-out problems.",
        ((metrics.ACCURACY, "training completions"), (metrics.HELDOUT_ACCURACY, "held-out problems")),
    ),
    Plot("Reward", "Mean of the weighted reward and of each reward function.", ((metrics.REWARD, "reward"),)),
    Plot(
        "Completion length",
        "Tokens of the completions of a step.",
        ((metrics.LENGTH_MEAN, "mean"), (metrics.LENGTH_MAX, "longest")),
    ),
    Plot(
        "Uniform groups",
        "Share of groups whose rewards are all equal, which have no gradient, and of groups whose answers are all "
        "correct or all wrong, with any rewards.",
        ((metrics.DEGENERATE, "equal rewards"), (metrics.ALL_RIGHT, "all correct"), (metrics.ALL_WRONG, "all wrong")),
    ),
    Plot(
        "Entropy",
        "Entropy of the policy per token, without completions whose advantage is 0.",
        ((metrics.ENTROPY, "entropy"),),
    ),
    Plot("KL to the reference", "KL divergence to the reference per token.", ((metrics.KL, "KL"),)),
    Plot(
        "Clipped tokens",
        "Share of tokens whose probability ratio was clipped.",
        ((metrics.CLIP_REGION, "either side"), (metrics.CLIP_LOW, "below"), (metrics.CLIP_HIGH, "above")),
    ),
    Plot(
        "Truncated completions",
        "Share of completions that were cut at the length limit.",
        ((metrics.TRUNCATED, "truncated"),),
    ),
    Plot("Gradient norm", "Norm of the gradient before it is clipped.", ((metrics.GRAD_NORM, "norm"),)),
    Plot("Time by phase", "Seconds of a step, and of its phases.", ((metrics.SECONDS_STEP, "step"), *PHASES.items())),
)
FIRST = 4  # plots that are shown unfolded


def curves(history: History, plot: Plot, ends: Sequence[tuple[int, Evaluation]] = ()) -> list[Curve]:
    """Return a curve for each metric of the plot that the history has.

    ``ends``: the evaluations before and after training with their steps. They are of other problems than those during
    training, and usually of more.
    """
    lines = dict(plot.lines)
    # Each reward function has its own metric. With one function, it is the reward itself up to its weight.
    if metrics.REWARD in lines:
        parts = {key: match[1] for row in history for key in row if (match := REWARD_PART.fullmatch(key))}
        lines |= parts if len(parts) > 1 else {}
    is_heldout = metrics.HELDOUT_ACCURACY in lines
    if is_heldout:  # a metric for each set of a recipe's heldout
        of_sets = [row for row in history if metrics.HELDOUT_ACCURACY not in row]
        lines |= {key: match[1] for row in of_sets for key in row if (match := metrics.HELDOUT_SET.fullmatch(key))}
    known = {key: label for key, label in lines.items() if any(key in row for row in history)}
    found = [curve(history, key, label) for key, label in known.items()]
    if is_heldout and ends:
        shares = [one.summary.accuracy for _, one in ends]
        steps, values, n = [step for step, _ in ends], [one.value for one in shares], [one.n for one in shares]
        found.append(Curve(_labelled("before and after training", n), steps, values, n, joined=False))
    return found


def curve(history: History, key: str, label: str) -> Curve:
    """Return the values of a metric."""
    rows = [row for row in history if key in row]
    n_key = f"{key.removesuffix(metrics.ACCURACY)}n"  # heldout/n, eval_NAME_n
    n = [row[n_key] for row in rows if n_key in row]
    n = n if len(n) == len(rows) else []
    return Curve(_labelled(label, n), [row[metrics.STEP] for row in rows], [row[key] for row in rows], n)


def _labelled(label: str, n: Sequence[float]) -> str:
    return f"{label}, n = {' and '.join(f'{one:g}' for one in dict.fromkeys(n))}" if n else label


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the mean of the values around each: a tenth of them, at most 51, and fewer at the ends.

    >>> smoothed([0, 3, 6, 0] * 8)[:3]
    [1.5, 3.0, 3.0]
    """
    # The window is on both sides: a mean of past values alone would show each change late.
    half = min(25, len(values) // 20)
    near = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in near]


def _draw(axes: Any, plot: Plot, lines: Sequence[Curve]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("optimizer step")
    for colour, line in zip(cycle(COLOURS), lines, strict=False):
        few = len(line.steps) <= MOST_MARKERS
        smooth = not line.n and len(line.values) >= SMOOTHED
        if smooth:  # the values themselves stay visible
            axes.plot(line.steps, line.values, color=colour, linewidth=0.8, alpha=0.35)
            axes.set_xlabel("optimizer step; thick: moving average")
        drawn = smoothed(line.values) if smooth else line.values
        # A line joins points of the same number of problems: those of another set are not comparable.
        sizes = line.n or [0.0] * len(drawn)
        for i, size in enumerate(dict.fromkeys(sizes)):
            points = [(step, value) for step, value, n in zip(line.steps, drawn, sizes, strict=True) if n == size]
            steps, values = zip(*points, strict=True)
            low, high = zip(*(wilson(value * size, size) for value in values), strict=True) if size else ((), ())
            if size and line.joined and len(points) > 1:
                axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
            else:
                axes.vlines(steps[: len(low)], low, high, color=colour, linewidth=1, alpha=0.6)
            marker = "o" if (few and not smooth) or not line.joined else ""
            label = fill(line.label, LEGEND) if i == 0 else None
            style = "-" if line.joined else ""
            axes.plot(steps, values, color=colour, marker=marker, linestyle=style, label=label)
    # The legend is between title and plot, where it covers nothing. Long names get columns of their own.
    longest = max(len(line.label) for line in lines)
    columns = max(1, min(3, 52 // (min(longest, LEGEND) + 8)))
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns)
    rows = sum(-(-len(line.label) // LEGEND) for line in lines) if columns == 1 else -(-len(lines) // columns)
    axes.set_title(plot.title, pad=10 + 18 * rows)
    axes.set_ylabel(plot.unit)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    # The axis starts at zero, or a small change would look like a large one.
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    if plot.unit == "share":
        # A little above 100%, so that a marker at the top is not cut.
        axes.set_ylim(0, min(1.02, max(0.05, axes.get_ylim()[1])))
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")


def _figure(drawn: Sequence[tuple[Plot, Sequence[Curve]]], size: tuple[float, float], dpi: int) -> Any:
    """Return the plots as one figure, two in a row."""
    import matplotlib
    from matplotlib.figure import Figure

    columns = min(2, len(drawn))
    rows = -(-len(drawn) // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), dpi=dpi, layout="constrained")
    with matplotlib.rc_context(STYLE):
        for position, (plot, lines) in enumerate(drawn, start=1):
            _draw(figure.add_subplot(rows, columns, position), plot, lines)
    return figure


def png(drawn: Sequence[tuple[Plot, Sequence[Curve]]]) -> bytes:
    buffer = io.BytesIO()
    # `run.earlier` knows the plots of a run by this name.
    _figure(drawn, (6, 3.8), 120).savefig(buffer, format="png", metadata={"Software": "grpo_math"})
    return buffer.getvalue()


def svg(plot: Plot, lines: Sequence[Curve]) -> dict[str, Any]:
    """Return a plot for the page, as the content of an SVG element of this size. ``points`` show their step and value.

    The page shrinks a plot to the width of a phone, so the figure is small and its letters are large.
    """
    buffer = io.BytesIO()
    # matplotlib writes SVG at 72 dpi. At the same dpi, the pixels of transData below are the units of the SVG.
    figure = _figure([(plot, lines)], (4.8, 3.3), 72)
    figure.savefig(buffer, format="svg", transparent=True)
    inside = Markup(_inside(buffer.getvalue().decode("utf-8")))
    # The constrained layout moves the axes when the figure is drawn, so positions are right only after savefig.
    axes, (width, height) = figure.axes[0], figure.bbox.size
    points = []
    for line in lines:
        stride = len(line.steps) // MOST_TITLES + 1
        for step, value in zip(line.steps[::stride], line.values[::stride], strict=True):
            x, y = axes.transData.transform((step, value))
            # matplotlib counts y from the bottom, SVG from the top.
            points.append((x, height - y, line.label, step, value))
    return {"plot": plot, "size": (width, height), "inside": inside, "points": points}


def _inside(text: str) -> str:
    """Return the content of matplotlib's SVG, with colours that follow the page's theme and without repeated ids."""
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    # Every figure has the same ids (figure_1, axes_1), and a page may have each id only once.
    text = re.sub(r'<g id="[^"]*"', "<g", text.removesuffix("</svg>\n"))
    text = re.sub(r"^<svg [^>]*>", "", text)
    return re.sub("|".join(CSS_COLOURS), lambda match: f"var(--{CSS_COLOURS[match[0]]})", text)

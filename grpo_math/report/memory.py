"""The memory plan of a run's recipe as HTML: a stacked bar for each phase, its terms, and the measured peak beside it.

Does not ask the Hub for shapes: where config.yaml does not say enough for a plan, it says what is missing.
"""

import math
from html import escape
from typing import Any

from grpo_math.errors import UserError
from grpo_math.report.run_dir import Run
from grpo_math.run import metrics
from grpo_math.run.machine import GB

COLOURS = 12  # .t0 to .t11 of page.css
FAR = 4  # times the peak: a limit further away would leave nothing of the bars


def memory_html(run: Run) -> str:
    """Bars and table, or one line that says why there is no plan; the measured peak; empty where nothing is known."""
    if not run.config or not run.own:
        return ""
    measured = _measured(run)
    answer = planned(run.config, _prompt_tokens(run))
    if isinstance(answer, str):
        return f"<p>No plan: {escape(answer)}.</p>{measured}"
    phases = answer["phases"]
    terms = list(dict.fromkeys(term for sizes in phases.values() for term in sizes))
    colours = {term: f"t{place % COLOURS}" for place, term in enumerate(terms)}
    peak, limit = max(sum(sizes.values()) for sizes in phases.values()), answer["gpu_gb"] * GB
    scale = max(peak, limit) if limit <= FAR * peak else peak
    bars = "".join(
        f"<dt>{phase}<br><small>{_gb(sum(sizes.values()))}</small></dt><dd>{_bar(sizes, colours, scale, limit)}</dd>"
        for phase, sizes in phases.items()
    )
    place = "of memory" if run.config.get("use_cpu") else "of a GPU"
    said = (
        f"Counted from the recipe and the model's shapes, for prompts of {answer['assumed']['prompt_tokens']} tokens: "
        f"{answer['peak_gb']:.2f} of {answer['gpu_gb']:.1f} GB {place} at the peak."
    )
    return f"<dl class=bars>{bars}</dl>{_table(phases, colours)}<p>{said}</p>{measured}"


def _prompt_tokens(run: Run) -> int | None:
    """Mean length of the first rollout's prompts: its tokens without those of its completions."""
    first = run.history[0] if run.history else {}
    tokens, completion = first.get(metrics.TOKENS), first.get(metrics.LENGTH_MEAN)
    rows = run.config.get("generation_batch_size")
    if tokens is None or completion is None or not isinstance(rows, int) or rows < 1 or first[metrics.STEP] != 1:
        return None
    length = round(tokens / rows - completion)
    return length if length > 0 and metrics.PROMPTS_DRAWN not in first else None


def planned(config: dict[str, Any], prompt_tokens: int | None = None) -> dict[str, Any] | str:
    """The answer of `grpo-math plan` for a resolved config.yaml, or why there is none.

    >>> planned({"model_name_or_path": "embedded", "use_cpu": False})
    'config.yaml does not say how much memory a GPU has'
    """
    from grpo_math import planner

    hardware, processes = config.get("hardware") or {}, config.get("num_processes") or 1
    if not isinstance(hardware, dict) or not isinstance(processes, int):
        return "config.yaml is damaged"
    if config.get("distributed_type") == "DEEPSPEED" and not config.get("deepspeed"):
        return "the settings of DeepSpeed are not in config.yaml"
    # What these come to stands in the fields of the micro-batch.
    recipe = {k: v for k, v in config.items() if k not in ("prompts_per_step", "generation_batch_size")}
    options: dict[str, Any] = {"cpu_gb": hardware.get("memory_gb"), "prompt_tokens": prompt_tokens}
    if not config.get("use_cpu"):
        if "gpu_memory_gb" not in hardware:
            return "config.yaml does not say how much memory a GPU has"
        of_server = config.get("use_vllm") and config.get("vllm_mode") == "server"
        gpus = processes + (config.get("vllm_tensor_parallel_size") or 1) * bool(of_server)
        options.update(gpus=gpus, gpu_gb=hardware["gpu_memory_gb"])
    try:
        answer = planner.plan(recipe, **options, accelerate={"num_processes": processes}, offline=True)
    except UserError as error:
        return str(error)
    except (TypeError, ValueError, KeyError, AttributeError):  # a config.yaml that something else wrote
        return "config.yaml does not hold the settings of a run"
    if not config.get("use_cpu") and len(answer["layout"][0]["gpus"]) != processes:
        return f"it would give the policy another number of GPUs than the {processes} of this run"
    return answer


def _bar(sizes: dict[str, int], colours: dict[str, str], scale: float, limit: float) -> str:
    parts = "".join(
        f'<span class={colours[term]} style="width:{size / scale:.2%}" title="{_name(term)}: {_gb(size)}"></span>'
        for term, size in sizes.items()
    )
    mark = f'<i style="left:{limit / scale:.2%}" title="all of it: {_gb(limit)}"></i>' if limit <= scale else ""
    return f"<div class=bar>{parts}{mark}</div>"


def _table(phases: dict[str, dict[str, int]], colours: dict[str, str]) -> str:
    head = "".join(f"<th scope=col>{name}</th>" for name in ("term", *phases))
    rows = "".join(
        f"<tr><th scope=row><span class='swatch {colour}'></span>{_name(term)}</th>"
        + "".join(f"<td>{_gb(sizes[term]) if term in sizes else ''}</td>" for sizes in phases.values())
        + "</tr>"
        for term, colour in colours.items()
    )
    return f"<table class=numbers><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _measured(run: Run) -> str:
    """The largest of each measured figure, in words."""
    said = []
    for key in (metrics.MEMORY_ALLOCATED, metrics.MEMORY_RESERVED, metrics.MEMORY_RESIDENT):
        values = [row[key] for row in run.history if math.isfinite(row.get(key, math.nan))]
        if values:
            said.append(f"{max(values) / GB:.2f} GB, {metrics.METRICS[key].meaning}")
    return f"<p>Measured: {'; '.join(said)}.</p>" if said else ""


def _gb(size: float) -> str:
    return f"{size / GB:.2f}&nbsp;GB" if size >= 0.01 * GB else f"{size / 2**20:.1f}&nbsp;MB"


def _name(term: str) -> str:
    from grpo_math.planner.memory import TERMS

    return TERMS.get(term, term)

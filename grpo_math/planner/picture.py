"""The answer of a plan as text: one stacked bar for each phase, the terms, what to change.

Does not count anything.
"""

from collections.abc import Mapping
from typing import Any

from grpo_math.planner.memory import TERMS
from grpo_math.run.machine import GB

WIDTH = 50
MARKS = "█▓▒░#*+=-:~oxs%&@"  # one for each term that is drawn


def picture(answer: Mapping[str, Any]) -> str:
    """Return the text that `grpo-math plan` prints.

    >>> answer = {"fits": True, "problems": [], "peak_gb": 3.0, "gpu_gb": 4.0, "largest": "base_weights",
    ...           "phases": {"training": {"base_weights": 2 * GB, "activations": GB}}, "layout": [], "why": "one GPU",
    ...           "batch": "1 prompt", "main_memory": {}, "suggestions": [], "recommended": None,
    ...           "assumed": {"prompt_tokens": 512, "mlp_tiles": 1}}
    >>> print("\\n".join(picture(answer).splitlines()[:2]))
    fits: 3.0 of 4 GB at the peak; largest: base weights
    training       3.0 GB █████████████████████████▓▓▓▓▓▓▓▓▓▓▓▓▓            |
    """
    phases = answer["phases"]
    drawn = [term for term in (*TERMS, "processes") if any(terms.get(term) for terms in phases.values())]
    marks = dict(zip(drawn, MARKS, strict=False))
    scale = max(answer["gpu_gb"] * GB, *(sum(terms.values()) for terms in phases.values()))
    verdict = "fits" if answer["fits"] else "does not fit"
    of = f"{answer['peak_gb']:.1f} of {round(answer['gpu_gb'], 1):g} GB at the peak"
    lines = [f"{verdict}: {of}; largest: {_name(answer['largest'])}"]
    lines += [_bar(phase, terms, marks, scale, answer["gpu_gb"] * GB) for phase, terms in phases.items()]
    for term in drawn:
        sizes = [f"{phase} {_gb(terms[term])}" for phase, terms in phases.items() if terms.get(term)]
        lines.append(f"  {marks[term]} {_name(term):<30} {', '.join(sizes)}")
    if answer["main_memory"]:
        lines.append("main memory: " + ", ".join(f"{_name(k)} {_gb(v)}" for k, v in answer["main_memory"].items()))
    lines += [f"GPU {', '.join(map(str, role['gpus'])) or '-'}: {role['role']}" for role in answer["layout"]]
    assumed = answer["assumed"]
    tiles = f"; MLPs in {assumed['mlp_tiles']} tiles of tokens" if assumed["mlp_tiles"] > 1 else ""
    slow = "; layers with a state as without their fast kernel" if assumed.get("slow_layers") else ""
    lines.append(f"({answer['why']}; {answer['batch']}; prompts of {assumed['prompt_tokens']} tokens{tiles}{slow})")
    if name := answer.get("accelerate_config"):
        lines.append(f"accelerate config: {name} ({'the first that fits' if answer['fits'] else 'as asked'})")
    if timed := answer.get("seconds"):
        spans = (f"{name} {low:g} to {high:g} s" for name, (low, high) in timed["ranges"].items())
        lines.append(f"time of a step: {', '.join(spans)} ({timed['assumed']})")
    lines += [f"problem: {problem}" for problem in answer["problems"]]
    for number, change in enumerate(answer["suggestions"], 1):
        saves = f"  saves {change['saves_gb']:.1f} GB" if change["saves_gb"] >= 0.05 else ""
        end = "; then it fits" if change["fits"] else ""
        lines.append(f"{number}. {'; '.join(change['set'])}{saves}{end}")
    if len(answer["suggestions"]) > 1:
        saved = sum(change["saves_gb"] for change in answer["suggestions"])
        lines.append(f"together: {saved:.1f} GB less, {answer['peak_gb'] - saved:.1f} GB at the peak")
    if not answer["fits"] and not any(change["fits"] for change in answer["suggestions"]):
        lines.append("no change of settings makes it fit: take a smaller model, or more memory")
    if better := answer["recommended"]:
        roles = "; ".join(f"GPU {', '.join(map(str, role['gpus']))} {role['role']}" for role in better["layout"])
        lines.append(f"fastest that fits: {'; '.join(better['set'])}  ({roles})")
    return "\n".join(lines)


def _bar(phase: str, terms: Mapping[str, int], marks: Mapping[str, str], scale: float, limit: float) -> str:
    cells, drawn, total = "", 0.0, sum(terms.values())
    for term, mark in marks.items():
        drawn += terms.get(term, 0)
        cells += mark * (int(WIDTH * drawn / scale + 0.5) - len(cells))
    end = int(WIDTH * limit / scale + 0.5)
    bar = f"{cells:<{WIDTH}}"
    bar = bar[:end] + "|" + bar[end:]
    return f"{phase:<11} {total / GB:6.1f} GB {bar}".rstrip()


def _gb(size: int) -> str:
    return f"{size / GB:.2f} GB" if size >= 0.01 * GB else f"{size / 2**20:.1f} MB"


def _name(term: str) -> str:
    return TERMS.get(term, term)

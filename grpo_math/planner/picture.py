"""The answer of a plan as text: the terms, who runs where, what to change."""

from collections.abc import Mapping
from typing import Any

from grpo_math.planner.memory import total
from grpo_math.system.machine import GB, size


def picture(answer: Mapping[str, Any]) -> str:
    """Return the text that `grpo-math plan` prints.

    >>> answer = {"fits": True, "problems": [], "notes": [], "gpu_gb": 4.0,
    ...           "phases": {"training": {"base_weights": 2 * GB, "activations": GB}}, "layout": [], "why": "one GPU",
    ...           "batch": "1 prompt", "main_memory": {}, "suggestions": [], "accelerate_config": None,
    ...           "prompt_tokens": 512, "best": None, "lacking": []}
    >>> print("\\n".join(picture(answer).splitlines()[:3]))
    fits: 3.0 of 4 GB at the peak; largest: base weights
      base weights                   training 2.00 GB
      activations                    training 1.00 GB
    """
    phases, fits = answer["phases"], answer["fits"]
    verdict = "fits" if fits else "does not fit"
    fullest = max(phases, key=lambda phase: total(phases[phase]))
    largest = max(phases[fullest], key=lambda term: phases[fullest][term])
    lines = [f"{verdict}: {_peak(answer)}; largest: {largest.replace('_', ' ')}", *answer["notes"]]
    rows = {phase: {**terms, "in_total": total(terms)} for phase, terms in phases.items()}
    names = [term for terms in phases.values() for term in terms]
    for term in (*dict.fromkeys(names), "in_total"):
        sizes = [f"{phase} {size(terms[term])}" for phase, terms in rows.items() if term in terms]
        lines.append(f"  {term.replace('_', ' '):<30} {', '.join(sizes)}")
    main = [f"{term.replace('_', ' ')} {size(number)}" for term, number in answer["main_memory"].items()]
    lines.append(f"main memory: {', '.join(main)}")
    lines += _roles(answer)
    lines.append(f"({answer['why']}; {answer['batch']}; prompts of {answer['prompt_tokens']} tokens)")
    if name := answer["accelerate_config"]:
        lines.append(f"accelerate config: {name} ({'the first that fits' if fits else 'as asked'})")
    lines += [f"problem: {problem}" for problem in answer["problems"]]
    for number, change in enumerate(answer["suggestions"], 1):
        saves = f"  saves {change['saves_gb']:.1f} GB" if change["saves_gb"] >= 0.05 else ""
        end = "; then it fits" if change["fits"] else ""
        lines.append(f"{number}. {'; '.join(change['set'])}{saves}{end}")
    if best := answer["best"]:
        lines += [f"then {_peak(best)}, and", *best["notes"]]
        lines += _roles(best)
    if command := answer.get("command"):
        lines.append(f"in one line: {command}")
    if extras := answer.get("extras"):
        constraints = "constraints-vllm.txt" if "vllm" in extras else "constraints.txt"
        lines.append(f'which needs: pip install -c {constraints} -e ".[{",".join(extras)}]"')
    if answer["lacking"]:
        lines.append("no change of settings makes it fit: take a smaller model, or more memory. All changes together:")
        lines += [f"  {problem}" for problem in answer["lacking"]]
    return "\n".join(lines)


def _peak(answer: Mapping[str, Any]) -> str:
    """Return the memory of the fullest GPU of the job in words."""
    phases = answer["phases"]
    fullest = max(phases, key=lambda phase: total(phases[phase]))
    where = ", on a GPU of the server" if fullest == "server" else ""
    return f"{total(phases[fullest]) / GB:.1f} of {round(answer['gpu_gb'], 1):g} GB at the peak{where}"


def _roles(answer: Mapping[str, Any]) -> list[str]:
    return [f"GPU {', '.join(map(str, role['gpus'])) or '-'}: {role['role']}" for role in answer["layout"]]

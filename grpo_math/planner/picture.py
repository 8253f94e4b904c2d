"""The answer of a plan as text: the terms, who runs where, what to change."""

from collections.abc import Iterator, Mapping
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
    sections = (_verdict, _terms, _roles, _reasons, _changes, _command, _lacking)
    return "\n".join(line for section in sections for line in section(answer))


def _verdict(answer: Mapping[str, Any]) -> list[str]:
    phases = answer["phases"]
    terms = phases[_fullest(phases)]
    largest = max(terms, key=lambda term: terms[term]).replace("_", " ")
    verdict = "fits" if answer["fits"] else "does not fit"
    return [f"{verdict}: {_peak(answer)}; largest: {largest}", *answer["notes"]]


def _terms(answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each term of the GPUs' memory, and one for the main memory."""
    phases = {phase: {**terms, "in_total": total(terms)} for phase, terms in answer["phases"].items()}
    names = [term for terms in answer["phases"].values() for term in terms]
    for term in (*dict.fromkeys(names), "in_total"):
        sizes = [f"{phase} {size(terms[term])}" for phase, terms in phases.items() if term in terms]
        yield f"  {term.replace('_', ' '):<30} {', '.join(sizes)}"
    main = [f"{term.replace('_', ' ')} {size(number)}" for term, number in answer["main_memory"].items()]
    yield f"main memory: {', '.join(main)}"


def _reasons(answer: Mapping[str, Any]) -> Iterator[str]:
    yield f"({answer['why']}; {answer['batch']}; prompts of {answer['prompt_tokens']} tokens)"
    if name := answer["accelerate_config"]:
        yield f"accelerate config: {name} ({'the first that fits' if answer['fits'] else 'as asked'})"
    yield from (f"problem: {problem}" for problem in answer["problems"])


def _changes(answer: Mapping[str, Any]) -> Iterator[str]:
    for number, change in enumerate(answer["suggestions"], 1):
        saves = f"  saves {change['saves_gb']:.1f} GB" if change["saves_gb"] >= 0.05 else ""
        end = "; then it fits" if change["fits"] else ""
        yield f"{number}. {'; '.join(change['set'])}{saves}{end}"
    if best := answer["best"]:
        yield from (f"then {_peak(best)}, and", *best["notes"], *_roles(best))


def _command(answer: Mapping[str, Any]) -> Iterator[str]:
    if command := answer.get("command"):
        yield f"in one line: {command}"
    if extras := answer.get("extras"):
        constraints = "constraints-vllm.txt" if "vllm" in extras else "constraints.txt"
        yield f'which needs: pip install -c {constraints} -e ".[{",".join(extras)}]"'


def _lacking(answer: Mapping[str, Any]) -> Iterator[str]:
    if answer["lacking"]:
        yield "no change of settings makes it fit: take a smaller model, or more memory. All changes together:"
    yield from (f"  {problem}" for problem in answer["lacking"])


def _peak(answer: Mapping[str, Any]) -> str:
    """Return the memory of the fullest GPU of the job in words."""
    phases = answer["phases"]
    fullest = _fullest(phases)
    where = ", on a GPU of the server" if fullest == "server" else ""
    return f"{total(phases[fullest]) / GB:.1f} of {round(answer['gpu_gb'], 1):g} GB at the peak{where}"


def _fullest(phases: Mapping[str, Any]) -> str:
    return max(phases, key=lambda phase: total(phases[phase]))


def _roles(answer: Mapping[str, Any]) -> list[str]:
    return [f"GPU {', '.join(map(str, role['gpus'])) or '-'}: {role['role']}" for role in answer["layout"]]

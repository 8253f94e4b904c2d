"""The metrics of the held-out sets that a run evaluates during training, under transformers' names.

Does not generate or grade: evaluation/ does, as before and after a run.
"""

from collections.abc import Mapping
from typing import Any

from grpo_math.run import metrics


def metrics_of(name: str, results: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a set. With several samples the accuracy is mean@n.

    >>> results = {"accuracy": 0.5, "accuracy_in_format": 0.25, "n": 30, "samples": 8, "ci95": [0.25, 0.75]}
    >>> results |= {"pass@k": {"8": 0.75}, "pass@k_ci95": {"8": [0.5, 0.9]}}
    >>> results |= {"maj@k": {"8": 0.5}, "maj@k_ci95": {"8": [0.25, 0.75]}}
    >>> list(metrics_of("aime2025", results))[-3:]
    ['eval_aime2025_maj@8', 'eval_aime2025_maj@8_ci95_low', 'eval_aime2025_maj@8_ci95_high']
    """
    values = {figure: results[figure] for figure in (metrics.ACCURACY, metrics.ACCURACY_IN_FORMAT, "n")}
    values["ci95_low"], values["ci95_high"] = results["ci95"]
    samples = results["samples"]
    for kind in ("pass", "maj") if samples > 1 else ():
        name_of_k, k = f"{kind}@{samples}", str(samples)
        values[name_of_k] = results[f"{kind}@k"][k]
        values[f"{name_of_k}_ci95_low"], values[f"{name_of_k}_ci95_high"] = results[f"{kind}@k_ci95"][k]
    return {f"{metrics.EVAL_PREFIX}{name}_{figure}": value for figure, value in values.items()}


def of_default_set(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that the findings compare with before.json and after.json, which are over the same set."""
    return {
        metrics.HELDOUT_ACCURACY: results[metrics.ACCURACY],
        metrics.HELDOUT_IN_FORMAT: results[metrics.ACCURACY_IN_FORMAT],
        metrics.HELDOUT_N: results["n"],
    }

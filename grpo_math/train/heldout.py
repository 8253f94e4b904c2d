"""The metrics of the held-out sets that a run evaluates during training, under transformers' names."""

from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback

from grpo_math.evaluation.paired import Results, compare
from grpo_math.run import metrics


def heldout_metrics(name: str, results: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a set. With several samples the accuracy is mean@n.

    >>> results = {"accuracy": 0.5, "accuracy_in_format": 0.25, "n": 30, "samples": 8, "ci95": [0.25, 0.75]}
    >>> results |= {"seconds": 9.5, "pass@k": {"8": 0.75}, "pass@k_ci95": {"8": [0.5, 0.9]}}
    >>> results |= {"maj@k": {"8": 0.5}, "maj@k_ci95": {"8": [0.25, 0.75]}}
    >>> heldout_metrics("amc", results)  # doctest: +NORMALIZE_WHITESPACE
    {'eval_amc_accuracy': 0.5, 'eval_amc_accuracy_in_format': 0.25, 'eval_amc_n': 30, 'eval_amc_runtime': 9.5,
     'eval_amc_ci95_low': 0.25, 'eval_amc_ci95_high': 0.75,
     'eval_amc_pass@8': 0.75, 'eval_amc_pass@8_ci95_low': 0.5, 'eval_amc_pass@8_ci95_high': 0.9,
     'eval_amc_maj@8': 0.5, 'eval_amc_maj@8_ci95_low': 0.25, 'eval_amc_maj@8_ci95_high': 0.75}
    """
    values = {figure: results[figure] for figure in (metrics.ACCURACY, metrics.ACCURACY_IN_FORMAT, "n")}
    values["runtime"] = results["seconds"]  # transformers' name
    values["ci95_low"], values["ci95_high"] = results["ci95"]
    samples = results["samples"]
    for kind in ("pass", "maj") if samples > 1 else ():
        name_of_k, k = f"{kind}@{samples}", str(samples)
        values[name_of_k] = results[f"{kind}@k"][k]
        values[f"{name_of_k}_ci95_low"], values[f"{name_of_k}_ci95_high"] = results[f"{kind}@k_ci95"][k]
    return {f"{metrics.EVAL_PREFIX}{name}_{figure}": value for figure, value in values.items()}


def default_set_metrics(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that the findings compare with before.json and after.json, which are over the same set.

    >>> default_set_metrics({"accuracy": 0.5, "accuracy_in_format": 0.25, "n": 30})
    {'heldout/accuracy': 0.5, 'heldout/accuracy_in_format': 0.25, 'heldout/n': 30}
    """
    return {
        metrics.HELDOUT_ACCURACY: results[metrics.ACCURACY],
        metrics.HELDOUT_IN_FORMAT: results[metrics.ACCURACY_IN_FORMAT],
        metrics.HELDOUT_N: results["n"],
    }


class StopAt(TrainerCallback):
    """End the run when ``metric`` is at least ``level`` at two evaluations in a row, also if the run was resumed."""

    def __init__(self, metric: str, level: float) -> None:
        self.metric = metric
        self.level = level

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The log is in each checkpoint. Values are kept by step: two lines of a step are one evaluation.
        values = {line[metrics.STEP]: line[self.metric] for line in state.log_history if self.metric in line}
        if len(values) > 1 and min(list(values.values())[-2:]) >= self.level:
            control.should_training_stop = control.should_save = True


def best_and_last(best: Results, last: Results, step: int) -> str:
    """Return a line: do the best checkpoint and the last weights differ, by the paired test?

    >>> row = {"problem": "1 + 1?", "gold": "2", "completion": "3", "category": "wrong_answer"}
    >>> rows = [{"id": number, **row} for number in range(40)]
    >>> correct = [{**row, "category": "correct"} for row in rows]
    >>> best_and_last({"rows": correct[:2] + rows[2:]}, {"rows": rows}, 7)
    'best     checkpoint-7: +5.0 points [...] against the last weights, on 40 problems ...: they do not differ clearly'
    >>> best_and_last({"rows": rows}, {"rows": correct[:30] + rows[30:]}, 7)
    'best     checkpoint-7: -75.0 points [...] against the last weights, on 40 problems ...: they differ'
    """
    paired = compare(last, best)
    verdict = "they differ" if paired.lo > 0 or paired.hi < 0 else "they do not differ clearly"
    interval = f"[{100 * paired.lo:+.1f}, {100 * paired.hi:+.1f}]"
    difference = f"{100 * paired.difference:+.1f} points {interval} against the last weights"
    return f"best     checkpoint-{step}: {difference}, on {paired.n} problems that did not choose it: {verdict}"

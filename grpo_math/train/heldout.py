"""The metrics of the held-out sets that a run evaluates during training, under transformers' names."""

from grpo_math.evaluation.evaluation import Evaluation
from grpo_math.run import metrics


def heldout_metrics(name: str, evaluation: Evaluation) -> dict[str, float]:
    """Return the metrics of a set. With several samples the accuracy is mean@n.

    >>> from grpo_math.evaluation.summary import Record, summarize
    >>> records = [Record("a", sample, answer="7", category="correct") for sample in range(2)]
    >>> evaluation = Evaluation({"samples": 2}, summarize(records, 2), records, seconds=9.5)
    >>> for name, value in heldout_metrics("amc", evaluation).items():
    ...     print(f"{name}={value:.3g}", end=" ")
    eval_amc_accuracy=1 eval_amc_accuracy_in_format=1 eval_amc_n=1 eval_amc_runtime=9.5 eval_amc_ci95_low=0.207 ...
    """
    summary, samples = evaluation.summary, evaluation.samples
    values = {metrics.ACCURACY: summary.accuracy.value, metrics.ACCURACY_IN_FORMAT: summary.accuracy_in_format}
    values |= {"n": summary.n, "runtime": evaluation.seconds}  # transformers' name
    values["ci95_low"], values["ci95_high"] = summary.accuracy.ci95
    for kind, by_k in {"pass": summary.pass_at_k, "maj": summary.maj_at_k}.items() if samples > 1 else ():
        label, share = f"{kind}@{samples}", by_k[samples]
        values[label] = share.value
        values[f"{label}_ci95_low"], values[f"{label}_ci95_high"] = share.ci95
    return {f"{metrics.EVAL_PREFIX}{name}_{figure}": value for figure, value in values.items()}

"""The metrics of the held-out sets that a run evaluates during training, under transformers' names."""

from dataclasses import replace

from grpo_math.evaluation.evaluation import Evaluation
from grpo_math.evaluation.paired import compare
from grpo_math.evaluation.tables import points
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


def best_and_last(best: Evaluation, last: Evaluation, step: int) -> str:
    """Return a line: do the best checkpoint and the last weights differ on the problems of ``best``, by the paired
    test?

    >>> from grpo_math.evaluation.summary import Record, summarize
    >>> def right(n: int, problems: int = 40) -> Evaluation:
    ...     records = [Record(i, category="correct" if i < n else "wrong_answer") for i in range(problems)]
    ...     return Evaluation({"samples": 1}, summarize(records), records)
    >>> best_and_last(right(2), right(0), 7)
    'best     checkpoint-7: +5.0 points [...] against the last weights, on 40 problems ...: they do not differ clearly'
    >>> best_and_last(right(0), right(30, problems=64), 7)
    'best     checkpoint-7: -75.0 points [...] against the last weights, on 40 problems ...: they differ'
    """
    keys = {record.key for record in best.records}
    last = replace(last, records=[record for record in last.records if record.key in keys])
    accuracy = compare(last, best).accuracy
    verdict = "they differ" if accuracy.lo > 0 or accuracy.hi < 0 else "they do not differ clearly"
    difference = f"{points(accuracy)} against the last weights"
    return f"best     checkpoint-{step}: {difference}, on {accuracy.n} problems that did not choose it: {verdict}"

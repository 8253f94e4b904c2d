"""The measurements that `meaning` reads: several samples of each problem, and completed ends of problems.

Each part of the probe is an evaluation with a separate results file, so that an interrupted probe continues.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_math.evaluation import meaning
from grpo_math.evaluation.backends import Model
from grpo_math.evaluation.results import Output, evaluate
from grpo_math.evaluation.suite import Sampling
from grpo_math.evaluation.summary import Results
from grpo_math.generation.request import Request
from grpo_math.run.files import write_json

Rows = Sequence[Mapping[str, Any]]
SLACK = 8  # tokens more than the end of a problem has


def parts(
    model: Model, rows: Rows, ends: Mapping[str, Rows], sampling: Sampling, output: Output, request: Request, **how: Any
) -> dict[str, Results]:
    """Return the results of several samples of each problem, and of each set of ``ends``, which are asked greedily.

    ``output``: that of the evaluation itself. ``how``: tools and time limit of the samples.
    """

    def part(name: str, rows: Rows, sampling: Sampling, request: Request, **how: Any) -> Results:
        path = Path(str(output.path)).with_suffix(f".{name}.json")
        return evaluate(model, rows, sampling, replace(output, path=path, contamination=None), request, **how)

    measured = {"samples": part("samples", rows, sampling, request, **how)}
    # Filters, stop strings and grammars of the run are for answers, not for plain text.
    text_request = Request(quantisation=request.quantisation, model_init_kwargs=request.model_init_kwargs)
    for name, end_rows in ends.items():
        if end_rows:
            longest_end = max(map(len, model.tokenizer([row["answer"] for row in end_rows])["input_ids"]))
            greedy = replace(sampling, samples=1, temperature=0.0, max_new_tokens=longest_end + SLACK)
            measured[name] = part(name, end_rows, greedy, text_request, grades=meaning.reproduced)
    return measured


def write_probe(data: str, sides: Mapping[str, Mapping[str, Results]]) -> dict[str, Any]:
    """Write the metrics of a probe next to its results, and return them. ``sides``: the `parts` of base and trained."""
    base, trained = sides["base"]["samples"], sides["trained"]["samples"]
    ends = [{side: each[name] for side, each in sides.items() if name in each} for name in ("memory", "control")]
    result = {
        "data": data,
        "problems_hash": base["problems_hash"],  # also the mark of a file of a run (run/earlier.py)
        "budget": meaning.budget(base, trained),
        "memory": meaning.memory(*ends) if all(ends) else None,
    }
    write_json(Path(base["results"]).with_name(meaning.PROBE), result)
    return result

"""The measurements of the probe: several samples of each problem, and completed ends of problems.

Each part of the probe is an evaluation with a separate results file, so that an interrupted probe continues.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_math.evaluation import meaning
from grpo_math.evaluation.engines import Model
from grpo_math.evaluation.evaluation import Evaluation
from grpo_math.evaluation.evaluator import evaluate_engine
from grpo_math.evaluation.probe_results import PROBE, Probe, budget, memory
from grpo_math.evaluation.suite import Sampling
from grpo_math.generation.request import Request
from grpo_math.run.files import write_json

Rows = Sequence[Mapping[str, Any]]
SLACK = 8  # tokens more than the end of a problem has


def parts(
    engine: Model,
    rows: Rows,
    ends: Mapping[str, Rows],
    sampling: Sampling,
    request: Request,
    output: Path,
    *,
    grade_timeout: float | None = None,
    **how: Any,
) -> dict[str, Evaluation]:
    """Return the evaluation of several samples of each problem, and of each set of ``ends``, which are asked greedily.

    ``output``: the results file of the evaluation itself. ``how``: other arguments of `evaluate_engine`.
    """
    files = {name: output.with_suffix(f".{name}.json") for name in ("samples", *ends)}
    answers: dict[str, Any] = {"grade_timeout": grade_timeout, **how}
    measured = {"samples": evaluate_engine(engine, rows, sampling, request, output=files["samples"], **answers)}
    # Filters, stop strings and grammars of the run are for answers, not for plain text.
    text_request = Request(quantisation=request.quantisation, model_init_kwargs=request.model_init_kwargs)
    for name, end_rows in ends.items():
        if end_rows:
            longest_end = max(map(len, engine.tokenizer([row["answer"] for row in end_rows])["input_ids"]))
            greedy = replace(sampling, samples=1, temperature=0.0, max_new_tokens=longest_end + SLACK)
            texts: dict[str, Any] = {"output": files[name], "grades": meaning.reproduced, **how}
            measured[name] = evaluate_engine(engine, end_rows, greedy, text_request, **texts)
    return measured


def write_probe(data: str, sides: Mapping[str, Mapping[str, Evaluation]]) -> Probe:
    """Write the metrics of a probe next to its results, and return them. ``sides``: the `parts` of base and trained."""
    base, trained = (sides[side]["samples"] for side in ("base", "trained"))
    ends = [{side: each[name] for side, each in sides.items() if name in each} for name in ("memory", "control")]
    probe = Probe(data, base.problems_hash, budget(base, trained), memory(*ends) if all(ends) else None)
    write_json(Path(str(base.path)).with_name(PROBE), probe.to_dict())
    return probe

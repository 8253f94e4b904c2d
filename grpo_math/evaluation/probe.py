"""Measure what `meaning` explains a result by: several samples of each problem, and the ends of problems.

Each part of the probe is an evaluation with a results file of its own, so that an interrupted probe continues.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grpo_math.evaluation import meaning
from grpo_math.evaluation.backends import Model
from grpo_math.evaluation.figures import Results
from grpo_math.evaluation.results import Output, evaluate
from grpo_math.evaluation.suite import Sampling
from grpo_math.evaluation.toolbox import Toolbox
from grpo_math.generation.request import Request
from grpo_math.run.bar import Bar
from grpo_math.run.files import write_json

Rows = Sequence[Mapping[str, Any]]
SLACK = 8  # tokens more than the end of a problem has


@dataclass
class Probe:
    """``plans``: data set -> the rows of the parts memory and control. Without plans, nothing is measured."""

    plans: Mapping[str, Mapping[str, Rows]]
    samples: int
    request: Request
    tools: Toolbox | None = None
    grade_timeout: float | None = None
    measured: dict[str, dict[str, dict[str, Results]]] = field(default_factory=dict)  # data set, part, side
    folders: dict[str, Path] = field(default_factory=dict)

    def bar(self, models: int, problems: Mapping[str, int]) -> AbstractContextManager[Any]:
        """Return one bar for all evaluations of the probe; without a probe True, and each evaluation has a bar."""
        if not self.plans:
            return nullcontext(True)
        # The evaluation itself, the samples, memory and control.
        total = sum(2 * n + sum(map(len, self.plans[name].values())) for name, n in problems.items())
        return Bar(total=models * total, desc="evaluating", unit="problem")

    def measure(self, name: str, side: str, model: Model, rows: Rows, sampling: Sampling, output: Output) -> None:
        """Evaluate the parts of a data set, after the evaluation with these settings."""
        if not self.plans:
            return
        file = Path(str(output.path))
        self.folders[name] = file.parent
        heat = sampling.temperature or meaning.TEMPERATURE
        parts = self.measured.setdefault(name, {"samples": {}, "memory": {}, "control": {}})
        drawn = replace(sampling, samples=self.samples, temperature=heat)
        parts["samples"][side] = evaluate(
            model,
            rows,
            drawn,
            replace(output, path=file.with_suffix(".samples.json"), contamination=None),
            self.request,
            tools=self.tools,
            grade_timeout=self.grade_timeout,
        )
        # Plain text continues greedily. Filters, stop strings and grammars of the run are for answers.
        plain = Request(quantisation=self.request.quantisation, model_init_kwargs=self.request.model_init_kwargs)
        for part, asked in self.plans[name].items():
            if asked:
                ends = model.tokenizer([row["answer"] for row in asked])["input_ids"]
                greedy = replace(sampling, samples=1, temperature=0.0, max_new_tokens=max(map(len, ends)) + SLACK)
                path = file.with_suffix(f".{part}.json")
                parts[part][side] = evaluate(
                    model,
                    asked,
                    greedy,
                    replace(output, path=path, contamination=None),
                    plain,
                    grades=meaning.reproduced,
                )

    def write(self) -> dict[str, Any]:
        """Write the figures of each data set next to its results, and return them."""
        figures = {}
        for name, parts in self.measured.items():
            samples = parts["samples"]
            figures[name] = {
                "data": name,
                # Also the mark of a file of a run (run/earlier.py).
                "problems_hash": samples["base"]["problems_hash"],
                "budget": meaning.budget(samples["base"], samples["trained"]),
                "memory": meaning.memory(parts["memory"], parts["control"]) if parts["memory"] else None,
            }
            write_json(self.folders[name] / meaning.PROBE, figures[name])
        return figures

"""The update of stock TRL against ours, on two models and every shape.

tests/update_benchmark.py measures; this program asks for models and shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

sys.path.insert(0, str(Path(__file__).parents[1]))
from update_benchmark import QWEN2_SMALL, SHAPES, bench_update, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=f"embedded,{QWEN2_SMALL}")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="also print one JSON object a model and shape")
    options = parser.parse_args()
    for model in options.models.split(","):
        for shape in options.shapes.split(","):  # one at a time: an aborted run has said something
            results = bench_update(model, [shape], runs=options.runs)
            lines = table(results).splitlines()
            print("\n".join(lines if shape == options.shapes.split(",")[0] else lines[2:]), flush=True)
            if options.json:
                print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()

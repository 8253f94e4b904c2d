"""The update of stock TRL against ours, with the bars that it is held to, on two models and every shape.

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

# The least ratio TRL / ours on 2 CPU cores, median of 5 interleaved runs; and no more memory than TRL anywhere.
BARS = {"gsm8k": 3.5, "short": 4.0, "math": 2.8, "degenerate": 5.5, "equal": 0.95, "one_token_prompt": 0.95}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=f"embedded,{QWEN2_SMALL}")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="also print one JSON object a model and shape")
    options = parser.parse_args()
    met = True
    for model in options.models.split(","):
        for shape in options.shapes.split(","):  # one at a time: an aborted run has said something
            results = bench_update(model, [shape], runs=options.runs)
            lines = table(results, BARS).splitlines()
            print("\n".join(lines if shape == options.shapes.split(",")[0] else lines[2:]), flush=True)
            if options.json:
                print(json.dumps(results), flush=True)
            met = met and results["same"] and "NOT MET" not in lines[2]
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())

"""What a call of the Python tool takes, against a plain `subprocess.run([python, "-c", code])` without any sandbox.

    python tests/benchmarks/tool_calls.py [--calls 40]

The two take turns in one process, so that a busy machine slows both; printed are medians, their ratio with the
quartiles of the ratio by pairs, and calls a second when a batch is given at once, against plain runs in a row.

Does not test anything: tests/tools does.
"""

import argparse
import statistics
import subprocess
import sys
import time

from grpo_math.tools import PythonLimits, python, together

CODES = {
    "a product": "print(1234 * 5678)",
    "sympy": "import sympy\nx = sympy.symbols('x')\nprint(sympy.solve(x**2 - 5*x + 6, x))",
    "numpy": "import numpy\nprint(numpy.arange(10).sum())",
}


def seconds(call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def compare(name: str, code: str, calls: int) -> None:
    limits, ours, plain = PythonLimits(), [], []
    python.call(code, limits)
    for _ in range(calls):
        ours.append(seconds(lambda: python.call(code, limits)))
        plain.append(seconds(lambda: subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)))
    low, ratio, high = statistics.quantiles([one / other for one, other in zip(ours, plain, strict=True)], n=4)
    tool, run = (1000 * statistics.median(times) for times in (ours, plain))
    print(
        f"  {name:10s} {tool:7.1f} ms a call, plain {run:7.1f} ms: {ratio:.2f} times (quartiles {low:.2f}, {high:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=40)
    calls = parser.parse_args().calls
    for name, code in CODES.items():
        compare(name, code, calls if name == "a product" else max(4, calls // 4))
    python.call("1", PythonLimits())
    code = CODES["a product"]
    batch = seconds(lambda: together([lambda: python.call(code, PythonLimits())] * calls))
    plain = seconds(lambda: [subprocess.run([sys.executable, "-c", code], capture_output=True) for _ in range(calls)])
    print(f"a batch: {calls / batch:.0f} calls a second, {python.default_size()} at once; plain: {calls / plain:.0f}")


if __name__ == "__main__":
    main()

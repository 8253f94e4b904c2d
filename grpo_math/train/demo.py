"""`grpo-math demo`: the shipped recipe of the embedded model, trained in this process."""

import argparse
import os
import sys
from pathlib import Path

from grpo_math.errors import ConfigError
from grpo_math.train import here

RECIPE = "launch/configs/demo_cpu.yaml"  # found from any folder, and no path of this machine in the run's command
TAKES = "This takes about 7 minutes of CPU time, as measured on one core of an AMD EPYC."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output_dir", default="runs/demo", help="the run directory (default: runs/demo)")
    parser.epilog = f"Any field of a recipe may follow.\n\n{parser.epilog}"


def run(args: argparse.Namespace) -> int:
    """Train the demo. A finished demo in the same folder is kept under a number."""
    if not args.output_dir:
        raise ConfigError("output_dir", "", "is missing", "name the folder that the run writes to")
    run_dir = Path(args.output_dir)
    if os.path.exists(run_dir / "after.json"):
        number = next(n for n in range(1, 1000) if not run_dir.with_name(f"{run_dir.name}.{n}").exists())
        run_dir.rename(earlier := run_dir.with_name(f"{run_dir.name}.{number}"))
        print(f"The earlier run is kept in {earlier}.", file=sys.stderr)
    if not args.fields:
        print(TAKES, file=sys.stderr)
    code = here.train(["--config", RECIPE, "--output_dir", str(run_dir), *args.fields])
    if code == 0:
        print("next     ask the trained model something of your own:")
        print(f'         grpo-math ask {run_dir} "What is 21 + 23?"')
    return code

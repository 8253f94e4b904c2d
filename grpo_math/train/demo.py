"""`grpo-math demo`: the shipped recipe of the embedded model, trained in this process."""

import argparse
import itertools
import sys
from pathlib import Path

from grpo_math.run import lock
from grpo_math.run.checkpoints import FINISHED
from grpo_math.settings.recipe import read_and_set_env
from grpo_math.train import launcher

# A path that is found from any folder. The run's command then contains no path of this machine.
RECIPE = "launch/configs/demo_cpu.yaml"
TAKES = "This takes about 10 minutes on 2 cores of an AMD EPYC."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output_dir", default="runs/demo", help="the run directory (default: runs/demo)")
    parser.epilog = f"Any field of a recipe may follow.\n\n{parser.epilog}"


def run(args: argparse.Namespace) -> int:
    """Train the demo. A finished demo in the same folder is kept under a number."""
    words = ["--config", RECIPE, "--output_dir", args.output_dir, *args.fields]
    settings = read_and_set_env(words).raise_first_problem().settings  # before the earlier run is renamed
    is_dry = settings.keeps_nothing
    run_dir = Path(args.output_dir)
    if (run_dir / FINISHED).exists() and not is_dry:
        # The earlier run may still be writing its report.
        lock.refuse_used(run_dir)
        names = (f"{run_dir.name}.{number}" for number in itertools.count(1))
        earlier = next(run_dir.with_name(name) for name in names if not run_dir.with_name(name).exists())
        run_dir.rename(earlier)
        print(f"The earlier run is kept in {earlier}.", file=sys.stderr)
    if not args.fields:
        print(TAKES, file=sys.stderr)
    code = launcher.train(words)
    if code == 0 and not is_dry:
        print("next     ask the trained model something of your own:")
        print(f'         grpo-math ask {args.output_dir} "What is 21 + 23?"')
    return code

"""`grpo-math doctor`: check a run before it starts, and print each finding at once."""

import argparse
import os

from grpo_math.checks.check_model import show
from grpo_math.checks.doctor import doctor, summary
from grpo_math.settings import recipe
from grpo_math.system.gpus import first_gpus
from grpo_math.system.streams import Answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="RECIPE", required=True, help="a file, or the name of a shipped recipe")
    parser.add_argument(
        "--show", type=int, metavar="N", help="show only the prompts of the first N problems, as tokens"
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="check a run on the first N GPUs of this machine")
    parser.add_argument("--accelerate_config", metavar="FILE", help="a file, or the name of one in accelerate_configs/")


def run(args: argparse.Namespace) -> Answer:
    """Print each finding at once, and answer with all of them."""
    argv = ["--config", args.config, *args.fields]
    recipe.read_and_set_env(argv)
    if args.show is not None:
        return show(argv, args.show)
    if args.gpus is not None:
        # Every check and torch then see only these.
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.device for gpu in first_gpus(args.gpus))
    findings = []
    for finding in doctor(argv, args.accelerate_config):
        findings.append(finding)
        if not args.json:
            print(finding.line(), flush=True)
    ok = all(finding.level != "error" for finding in findings)
    # doctor loads no weights.
    more = "\ntrain --dry_run also loads the model and makes the trainer, then stops" * ok
    return Answer({"ok": ok, "findings": [finding._asdict() for finding in findings]}, summary(findings) + more, ok)

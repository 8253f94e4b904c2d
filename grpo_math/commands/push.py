"""`grpo-math push`: push a finished run to a repository on the Hub."""

import argparse

from grpo_math.system.streams import Answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", help="a finished run")
    add("--repo_id", help="user/name (default: the run directory's name, in your account)")
    add("--private", action="store_true", help="make a private repository")
    add("--base_model", help="the base's name on the Hub, if the run was trained from a folder")
    add("--revision", help="push to this branch (default: main)")
    add("--dry_run", action="store_true", help="list the files, and push nothing")
    add("--checkpoint", help="best, or a folder's name (default: the last weights)")


def run(args: argparse.Namespace) -> Answer:
    """Push the run."""
    from grpo_math.report.hub import push

    pushed = push(
        args.run_dir,
        args.repo_id,
        private=args.private or None,
        base_model=args.base_model,
        revision=args.revision,
        checkpoint=args.checkpoint,
        dry_run=args.dry_run,
    )
    if args.dry_run:
        lines = [f"{size:14,}  {name}" for name, size in pushed["files"].items()]
        return Answer(pushed, "\n".join([f"would push to {pushed['repo_id']}, in bytes:", *lines]))
    return Answer(pushed, f"pushed   {len(pushed['files'])} files: {pushed['url']}")

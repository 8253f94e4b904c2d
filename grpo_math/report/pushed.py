"""Answer `grpo-math push`: push a finished run to a repository on the Hub."""

import argparse

from grpo_math.run.streams import Answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", help="a finished run")
    add("--repo_id", help="user/name (default: the run directory's name, under your own)")
    add("--private", action="store_true", help="make a private repository")
    add("--merge", action="store_true", help="the whole model: the base in bfloat16 with the adapter in it")
    add("--base_model", help="the base's name on the Hub, if the run was trained from a folder")
    add("--revision", help="push to this branch (default: main)")
    add("--checkpoint", help="best, or a folder's name (default: the last weights)")
    add("--dry_run", action="store_true", help="show the card and the files, and push nothing")


def run(args: argparse.Namespace) -> Answer:
    """Push the run, or show what would be pushed."""
    from grpo_math.report.hub import prepared, push

    settings = {name: getattr(args, name) for name in ("repo_id", "merge", "base_model", "checkpoint")}
    if args.dry_run:
        shown = prepared(args.run_dir, **settings)
        lines = [f"{size:>13,} {name}" for name, size in shown["files"].items()]
        return Answer(shown, "\n".join([shown["card"], f"{len(lines)} files, in bytes:", *lines]))
    pushed = push(args.run_dir, private=args.private or None, revision=args.revision, **settings)
    return Answer(pushed, f"pushed   {len(pushed['files'])} files: {pushed['url']}")

"""`grpo-math serve`: run a recipe's vLLM server for a training that runs elsewhere."""

import argparse

from grpo_math.errors import UserError
from grpo_math.generation import vllm_env
from grpo_math.settings.recipe import read_and_set_env
from grpo_math.settings.shipped import is_file
from grpo_math.system.streams import Answer, say
from grpo_math.train.serve import serve

ENVIRONMENT = ".venv-vllm"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--gpus", type=int, metavar="N", help="use the first N GPUs (default: all visible ones)")
    add("--host", help="the address to listen on (default: 127.0.0.1; others need VLLM_API_KEY)")
    add("--port", type=int, help="the port (default: vllm_server_port, else 8000 or a free one)")
    add("--check", action="store_true", help="start nothing; print what a run sends: adapter, weights or none")
    add(
        "--make_env",
        nargs="?",
        const=ENVIRONMENT,
        metavar="DIR",
        help=f"start nothing; make the environment for vLLM (default: {ENVIRONMENT}), and print the path of its vllm",
    )
    parser.epilog = f"GRPO_MATH_VLLM names the vllm that serves (default: the one in PATH).\n\n{parser.epilog}"


def run(args: argparse.Namespace) -> Answer | int:
    """Serve until Ctrl-C. The words after ``--`` on the command line go to vLLM."""
    folder, fields = args.make_env, args.fields
    # `--make_env RECIPE`
    if folder and is_file(folder):
        folder, fields = ENVIRONMENT, ["--config", folder, *fields]
    settings = read_and_set_env(fields).raise_first_problem().settings
    if folder:
        if vllm_env.needed_in_training(settings):
            say("note", "this recipe trains in an environment with vLLM, which serves, too: see grpo-math plan")
        print(vllm_env.make(folder))
        return 0
    if args.check:
        sent = "adapter" if settings.sends_adapter else "weights"
        answer = sent if settings.starts_server else "none"
        return Answer({"server": answer}, answer)
    if args.json:
        raise UserError("--json would be ignored without --check: leave it out")
    if settings.generation != "server":
        raise UserError("this recipe has no server to start: set use_vllm: true and vllm_mode: server, or use train")
    port = args.port or settings.requested("vllm_server_port")
    return serve(settings, args.gpus, port, args.host or "127.0.0.1", args.after_dashes)

"""`grpo-math attack`: show what rewards pay for blind guesses."""

import argparse

from grpo_math.checks.attack import attack, lines
from grpo_math.checks.check_services import cache_only
from grpo_math.checks.setup import Setup
from grpo_math.rewards import REWARDS
from grpo_math.settings import recipe
from grpo_math.settings.shipped import target_options
from grpo_math.system.streams import Answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="RECIPE", help="a recipe, or a reward: a name or module:function")


def run(args: argparse.Namespace) -> Answer:
    """Attack the rewards of a recipe, or one reward function."""
    is_reward = ":" in (args.config or "") or args.config in REWARDS
    words = target_options(args.config, "--rewards", REWARDS, is_reward)
    read = recipe.read_and_set_env([*words, *args.fields]).raise_first_problem()
    # The note is dropped: an error about the data names the reason.
    cache_only([read.settings.dataset])
    result = attack(Setup(read))
    answer = result.to_dict()
    return Answer(answer, "\n".join(lines(result)), answer["ok"])

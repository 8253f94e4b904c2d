"""`grpo-math audit`: find the rows of a data set that teach nothing or something wrong."""

import argparse
from pathlib import Path

from grpo_math.checks.audit import COLUMN, PROMPT_TOKENS, TESTS, audit
from grpo_math.errors import ConfigError, UserError
from grpo_math.problems.sources import SOURCES, hub_id
from grpo_math.run.files import require_new
from grpo_math.settings.recipe import read_and_set_env
from grpo_math.settings.shipped import target_options
from grpo_math.system.streams import Answer
from grpo_math.system.table_files import is_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--config", metavar="RECIPE", help="a recipe, or the name or file of a data set")
    add("--write_clean", metavar="FILE", help="write the rows that can teach, and FILE.left_out.jsonl")
    add("--bare_numbers", action="store_true", help=f"write each gold answer's number in the column {COLUMN}")
    add("--keep_choices", action="store_true", help="keep multiple-choice letters, which are left out else")
    add("--tests", default=TESTS, help=f"sets that must not overlap (default: {TESTS})")
    add("--prompt_tokens", type=int, default=PROMPT_TOKENS, metavar="N", help="the longest problem (default: 512)")


def run(args: argparse.Namespace) -> Answer:
    """Audit the data set, and write the clean rows if a file is named."""
    target = args.config
    is_recipe = Path(target or "").suffix in (".yaml", ".yml")
    is_data = target and not is_recipe and (hub_id(target) or is_table(target) or Path(target).is_dir())
    words = target_options(target, "--dataset", SOURCES, bool(is_data))
    settings = read_and_set_env([*words, *args.fields]).raise_first_problem().settings
    clean = args.write_clean
    if clean:
        require_new("write_clean", clean)
    if args.bare_numbers and not clean:
        raise UserError("--bare_numbers writes a column: give --write_clean FILE")
    if clean and not clean.endswith(".jsonl"):
        raise ConfigError("write_clean", clean, "is not a .jsonl file", "the rows are written as lines of JSON")
    result, text = audit(settings, args.tests, args.prompt_tokens, clean, args.bare_numbers, args.keep_choices)
    return Answer(result, text, result["ok"])

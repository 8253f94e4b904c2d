"""The commands of README.md and docs/, as a new user types them: each block that a CPU can run is run, the others are
held to files, commands and options that exist.

README.md is run from the top, in one folder. Each page of docs/ is run from the top in a copy of that folder as
README.md left it, so that a page may use what README.md made and nothing of another page. After each block, git shows
no new file in the folder that the page does not name.

The rules, which the README states: a block that begins with `# needs: ...` is not run. The commands of `SHORTER` get
those options appended, which win over what stands on the page. A ```python block that begins with `# NAME.py` is that
file; any other is run. A ```text block is what the ```bash block before it prints: each line has to come, unless a
command of that block was made shorter.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from itertools import dropwhile
from pathlib import Path
from typing import NamedTuple

import pytest
from launching import SHEBANG, write_program

from grpo_math.cli import COMMANDS, command_parser, recipe_first
from grpo_math.errors import UserError
from grpo_math.settings import recipe

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NEEDS = {"a package index", "a GPU", "the Hub", "SLURM", "vLLM", "an hour", "finished runs", "a checkout", "llama.cpp"}
# The words of a command -> what is appended. The first pattern that matches counts.
LESS = "--max_steps 1 --heldout_every 0 --model_name_or_path TINY"
SHORTER = [
    (r"evaluate --run", "--n 4"),
    (r"(demo|train) .*--eval_n 0", LESS),
    (r"(demo|train)\b", f"{LESS} --eval_n 4"),
    (r"evaluate (?!--compare)", "--n 4 --model TINY"),
]
COMMAND = """
import re, sys
from pathlib import Path
from grpo_math.cli import main

if __name__ == "__main__":
    words = sys.argv[1:]
    for pattern, less in {shorter!r}:
        if re.match(pattern, " ".join(words)):
            Path(".shorter").touch()
            words += less.replace("TINY", {tiny!r}).split()
            break
    sys.exit(main(words))
"""


BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$(?:(?:(?!^```).)*?^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str
    prints: str | None  # the text block that follows


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(page, text.count("\n", 0, block.start()) + 1, *block.groups()) for block in BLOCK.finditer(text)]


BLOCKS = [block for page in PAGES for block in blocks(page)]
NOT_RUN = [block for block in BLOCKS if block.text.startswith("# needs: ")]
RUN = [block for block in BLOCKS if block not in NOT_RUN]
EXAMPLES = [
    re.sub(r"my_recipe|a(?=\.json)|b(?=\.json)", "MINE", example.partition(" < ")[0])
    for command in COMMANDS.values()
    for example in command.examples
]


def line(block: Block) -> str:
    return f"{block.page.name} line {block.line}"


@pytest.fixture(scope="module")
def clone(tmp_path_factory, tiny):
    """A folder with what a clone has for its user, and a `grpo-math` that does less of the same. README.md has run."""
    folder = tmp_path_factory.mktemp("readme") / "clone"
    for name in ("launch", "accelerate_configs", "deepspeed"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / ".gitignore", folder)
    git(folder, "init", "--quiet")
    (folder / ".git/info/exclude").write_text("/.commands/\n/.shorter\n")
    write_program(folder / ".commands/grpo-math", SHEBANG + COMMAND.format(shorter=SHORTER, tiny=tiny()))
    run(PAGES[0], folder)
    return folder


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout


def run(page: Path, folder: Path) -> None:
    git(folder, "add", "--all")
    named = ""
    commands = os.pathsep.join([str(folder / ".commands"), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": commands, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    for block in (block for block in RUN if block.page == page):
        named += block.text + (block.prints or "")
        if name := re.match(r"# (\w+\.py)\n", block.text):
            (folder / name[1]).write_text(block.text)
            continue
        call = ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else [sys.executable, "-P", "-c"]
        (folder / ".shorter").unlink(missing_ok=True)
        done = subprocess.run([*call, block.text], capture_output=True, text=True, cwd=folder, env=environment)
        assert done.returncode == 0, f"{line(block)}: {done.stderr[-3000:]}"
        new = git(folder, "ls-files", "--others", "--exclude-standard").splitlines()
        assert [path for path in new if path not in named] == [], line(block)
        if block.prints and not (folder / ".shorter").exists():
            assert set(block.prints.splitlines()) <= set(done.stdout.splitlines()), f"{line(block)}: {done.stdout}"


@pytest.mark.full(keep=["README"])
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page, clone, tmp_path):
    if page != PAGES[0]:
        run(page, shutil.copytree(clone, tmp_path / "clone"))


@pytest.mark.parametrize("block", NOT_RUN, ids=line)
def test_a_block_that_is_not_run_says_why_and_names_what_exists(block):
    assert set(block.text.splitlines()[0].removeprefix("# needs: ").split(", ")) <= NEEDS
    if block.language == "python":
        compile(block.text, block.page.name, "exec")
    else:
        check(block.text)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_of_a_help_is_a_command_that_exists(example):
    check(example)


@pytest.mark.parametrize(
    "text",
    [
        "grpo-math train --config launch/configs/nowhere.yaml",
        "grpo-math train --config RECIPE.yaml --learning_rat 1",
        "grpo-math evaluate --modle M",
        "grpo-math fly",
        "accelerate launch --config_file accelerate_configs/zero2.yaml -m grpo_math.nothing --config R.yaml",
        "./launch/train.sh RECIPE.yaml accelerate_configs/zero2.yaml --num_processes 2 -- --sede 1",
        "./launch/none.sh",
        "sbatch launch/slurm/none.sbatch",
    ],
)
def test_a_command_that_does_not_exist_is_found(text):
    with pytest.raises((AssertionError, KeyError, UserError, OSError)):
        check(text)


def test_most_blocks_are_run():
    assert len(RUN) >= 15


def commands(text: str) -> list[list[str]]:
    """The commands of a bash block as words, without assignments before them; `$(...)` is a command too.

    >>> commands("export X=$(./launch/a.sh)\\nA=1 grpo-math train \\\\\\n  --seed 1 # so && so\\n. b && c")
    [['./launch/a.sh'], ['grpo-math', 'train', '--seed', '1'], ['.', 'b'], ['c']]
    """
    text = re.sub(r"\\\n|(?:^|(?<=\s))#.*", " ", text, flags=re.MULTILINE)
    text = re.sub(r".*\$\((.*)\).*", r"\1", text)
    lines = map(shlex.split, re.split("\n|&&", text))
    results = [list(dropwhile(lambda word: re.match(r"export$|\w+=", word), line)) for line in lines]
    return [result for result in results if result]


def check(text: str) -> None:
    """Fail unless the files of each command exist, and the options of our own commands."""
    for program, *words in commands(text):
        # A name in capitals is the reader's own.
        files = [
            word for word in words if re.search(r"\.(yaml|sbatch|txt|json)$", word) and not Path(word).stem.isupper()
        ]
        assert [file for file in files if not (ROOT / file).is_file()] == []
        if program.startswith("./"):
            assert (ROOT / program).stat().st_mode & 0o111
        if program == "grpo-math":
            check_own(*words)
        elif program == "accelerate":
            module, *fields = words[words.index("-m") + 1 :]
            assert find_spec(module)
            check_recipe(fields)
        elif program == "./launch/train.sh":
            check_recipe(["--config", words[0], *(words[words.index("--") + 1 :] if "--" in words else words[2:])])


def check_own(command: str, *words: str) -> None:
    given = list(words[: words.index("--")] if "--" in words else words)
    if COMMANDS[command].fields:
        parser = command_parser(command)
        parsed, given = parser.parse_known_args(recipe_first(parser, given))
        check_recipe(given + (["--config", parsed.config] if getattr(parsed, "config", None) else []))
    else:
        command_parser(command).parse_args(given)


def check_recipe(words: list[str]) -> None:
    known = [str(ROOT / "launch/configs/demo_cpu.yaml") if Path(word).stem.isupper() else word for word in words]
    # The command before it makes this adapter.
    made = "adapter='runs/sft' is not a folder"
    assert [str(one) for one in recipe.read(known).problems if not str(one).startswith(made)] == []

"""The structure: imports point downward, the light parts stay light, and no file or function outgrows one idea."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

PACKAGE = Path(__file__).parents[1] / "grpo_math"
ROOMS = [
    {"cli"},
    {"train", "grade_command"},
    {"report"},
    {"checks"},
    {"planner"},
    {"trainer", "evaluation"},
    {"settings"},
    {"generation", "problems", "rewards", "tools"},
    {"grading"},
    {"run"},
    {"yaml_files"},
    {"reading"},
    {"errors"},
]
LEVEL = {name: level for level, names in enumerate(ROOMS) for name in names}
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]

TORCH = {  # what computes, or hands on to what computes; all else starts without torch
    *("checks.live", "checks.training", "trainer.from_recipe"),
    *("evaluation.ask", "evaluation.backends", "evaluation.engine", "evaluation.of_trainer", "evaluation.results"),
    *("evaluation.toolbox", "trainer.overrides", "trainer.reward_funcs", "trainer.turns"),
    *("generation.adapters", "generation.canary", "generation.completions", "generation.decoding", "generation.sync"),
    *("generation.cache", "generation.streaming"),
    *("planner.fake", "planner.layers", "planner.measure"),
    *("report.trackers", "report.verdict", "run.failures", "run.log"),
    *("train.heldout", "train.program", "train.resuming"),
    *(
        "trainer.advantages",
        "trainer.prefetch",
        "trainer.attention",
        "trainer.budget",
        "trainer.build",
        "trainer.config",
        "trainer.console",
        "trainer.endings",
        "trainer.gradients",
    ),
    *(
        "trainer.longest",
        "trainer.losses",
        "trainer.meter",
        "trainer.micro_batches",
        "trainer.packing",
        "trainer.reference",
    ),
    *(
        "trainer.correction",
        "trainer.recurrent",
        "trainer.resample",
        "trainer.rows",
        "trainer.run_files",
        "trainer.scoring",
        "trainer.state",
    ),
    *("trainer.table", "trainer.tiled_mlp", "trainer.trainer", "trainer.varlen"),
}
TRL = {  # of these, what needs TRL itself
    *("checks.training", "trainer.from_recipe", "generation.sync", "generation.canary", "report.verdict"),
    *("train.program", "train.resuming"),
    *("trainer.prefetch", "trainer.build", "trainer.config", "trainer.trainer"),
}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def room_of(path: Path) -> str:
    return name_of(path).partition(".")[0]


def imported(path: Path) -> set[str]:
    """The rooms that a file imports, wherever in the file."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module] if node.module != "grpo_math" else [f"grpo_math.{a.name}" for a in node.names]
    return {name.split(".")[1] for name in names if name.startswith("grpo_math.")} - {"__version__"}


def test_every_room_has_a_layer_and_no_layer_names_what_is_gone():
    assert {room_of(path) for path in FILES} == set(LEVEL)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_downward(path):
    room = room_of(path)
    upward = {other for other in imported(path) - {room} if LEVEL[other] <= LEVEL[room]}
    assert not upward, f"{name_of(path)} imports {upward}, which does not stand below it"


def test_only_the_trainer_overrides_trl():
    for path in FILES:
        assert ("(GRPOTrainer)" in path.read_text(encoding="utf-8")) == (name_of(path) == "trainer.trainer"), path


def loaded_by(statement: str) -> set[str]:
    program = f"{statement}\nimport sys\nprint(' '.join(m for m in sys.modules if '.' not in m))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split("\n")[-2].split())


def blame(names: list[str], heavy: set[str]) -> str:
    """The first of the modules that loads a heavy one: all are imported by one interpreter, in turn."""
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module('grpo_math.' + name)\n"
        f"    found = {heavy!r} & sys.modules.keys()\n"
        "    if found:\n        print(name, *sorted(found))\n        break\n"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def modules(but: set[str]) -> list[str]:
    return [name for name in map(name_of, FILES) if name not in but and not name.endswith("__main__")]


@pytest.mark.slow
def test_the_light_modules_load_neither_torch_nor_transformers_nor_trl():
    light = modules(but={*TORCH, "grading.judge"})
    assert not blame(light, {"torch", "transformers", "trl", "datasets", "sympy", "matplotlib"})


def test_the_pure_modules_load_no_trl():
    assert not blame([name for name in modules(but=TRL) if name in TORCH], {"trl"})


def test_the_lists_of_heavy_modules_name_what_is_there():
    assert set(map(name_of, FILES)) >= TORCH >= TRL


def test_help_loads_no_torch():
    statement = (
        "from grpo_math.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "try:\n    main(['grade', '--help'])\nexcept SystemExit:\n    pass\n"
    )
    assert not loaded_by(statement) & {"torch", "transformers", "trl", "datasets", "numpy", "matplotlib"}


def test_importing_the_package_loads_nothing_heavy():
    assert not loaded_by("import grpo_math") & {"torch", "transformers", "trl", "numpy"}


def test_the_public_names_are_there():
    program = (
        "from grpo_math import MathGRPOConfig, MathGRPOTrainer, grade, Verdict, REWARDS, load_problems, evaluate\n"
        "assert callable(evaluate) and callable(grade) and REWARDS['accuracy']\n"
        "import grpo_math.evaluation.results, grpo_math.report.page, grpo_math.planner.plan\n"
        "from grpo_math.trainer import MathGRPOConfig, MathGRPOTrainer\n"
        "from grpo_math.rewards import REWARDS, load_reward, make_overlong, make_llm_judge, text_of\n"
        "from grpo_math.grading import grade, grade_batch, Verdict, Grade\n"
        "from grpo_math.planner import plan\n"
        "from grpo_math.report import report, compare\n"
        "from grpo_math.checks import Finding\n"
        "assert all(map(callable, (evaluate, plan, report, compare, make_overlong)))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_file_holds_one_idea():
    assert median(len(path.read_text(encoding="utf-8").splitlines()) for path in FILES) <= 150


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_function_fits_on_a_screen(path):
    """A longer one says why in its docstring, in a sentence that begins with "Long because"."""
    for node in functions(ast.parse(path.read_text(encoding="utf-8"))):
        length = (node.end_lineno or 0) - node.lineno + 1
        assert length <= 60 or "Long because" in (ast.get_docstring(node) or ""), f"{node.name}: {length} lines"


def test_no_test_module_imports_another():
    """What two of them need lies in a module of its own, directly under tests/."""
    for path in (PACKAGE.parent / "tests").rglob("test_*.py"):
        assert not re.search(r"^ *(from|import) .*\btest_\w+", path.read_text(encoding="utf-8"), re.MULTILINE), path

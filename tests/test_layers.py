"""The structure: imports point downward, the light parts stay light, and no file or function outgrows one idea."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from progress import SECONDS

PACKAGE = Path(__file__).parents[1] / "grpo_math"
ROOMS = [
    {"cli"},
    {"commands"},
    {"train"},
    {"report"},
    {"checks"},
    {"planner"},
    {"trainer", "evaluation"},
    {"packing"},
    {"algorithm"},
    {"generation", "problems", "rewards"},
    {"grading"},
    {"run"},
    {"settings"},
    {"system"},
    {"errors"},
    {"redact"},
]
LEVEL = {name: level for level, names in enumerate(ROOMS) for name in names}
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]

TORCH = {  # what computes, or hands on to what computes; all else starts without torch
    *("checks.live", "checks.training", "checks.compared", "checks.selftest", "checks.tiny_model"),
    "trainer.recipe_settings",
    *("evaluation.ask", "evaluation.engines", "evaluation.for_scripts"),
    *("evaluation.evaluator", "evaluation.trainer_engines"),
    *("trainer.reward_funcs", "trainer.row_scorer"),
    *("generation.adapters", "generation.canary", "generation.completions", "generation.decoding", "generation.sync"),
    *("generation.cache", "generation.decode_mask", "generation.folded_adapter", "generation.four_bit"),
    "generation.shared",
    *("generation.adapter_store", "generation.sampler", "generation.server_sampler", "generation.colocated_sampler"),
    "generation.lost_server",
    *("planner.fake", "planner.layers", "planner.measure"),
    *("report.trackers", "report.finish", "run.failures", "run.log"),
    *("train.heldout", "train.measure", "train.program", "train.resuming"),
    *(
        "trainer.build",
        "trainer.config",
        "trainer.console",
        "trainer.gradients",
        "trainer.largest_batch",
        "trainer.meter",
    ),
    *(
        "trainer.constructor",
        "trainer.loading",
        "trainer.loss_settings",
        "trainer.trainer_parts",
        "trainer.rollout_in_progress",
        "trainer.grader",
        "trainer.updates",
    ),
    *("trainer.rollout_queue", "trainer.run_files", "trainer.state", "trainer.step_cost", "trainer.table"),
    *("trainer.teacher", "trainer.tiled_mlp", "trainer.float16", "trainer.trainer"),
    *(f"algorithm.{path.stem}" for path in (PACKAGE / "algorithm").glob("[a-z]*.py")),
    *(f"packing.{path.stem}" for path in (PACKAGE / "packing").glob("[a-z]*.py")),
}
TRL = {  # of these, what needs TRL itself
    *("checks.training", "trainer.recipe_settings", "generation.sync", "generation.colocated_sampler", "report.finish"),
    *("train.measure", "train.program", "train.resuming"),
    *("checks.compared", "checks.selftest"),
    *(
        "trainer.constructor",
        "trainer.rollout_queue",
        "trainer.row_scorer",
        "trainer.updates",
        "trainer.trainer_parts",
        "trainer.build",
        "trainer.config",
        "trainer.teacher",
        "trainer.trainer",
    ),
}

ELSEWHERE = {"grading.judge"}  # it starts in a process of its own


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


NAMES = set(map(name_of, FILES))


@cache
def trees() -> dict[str, ast.Module]:
    return {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield each function with the name of its file."""
    for name, tree in trees().items():
        yield from ((name, node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_imports_point_downward():
    for file, tree in trees().items():
        room = file.partition(".")[0]
        for node in ast.walk(tree):
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                imported = [f"{node.module}.{name}" for name in imported]
            others = {name.split(".")[1] for name in imported if name.startswith("grpo_math.")} - {"__version__", room}
            upward = {other for other in others if LEVEL[other] <= LEVEL[room]}
            assert not upward, f"{file} imports {upward}, which does not stand below it"


def test_a_function_fits_on_a_screen():
    """A longer one says why in its docstring, in a sentence that begins with "Long because"."""
    for file, function in functions():
        length = function.end_lineno - function.lineno + 1
        explained = "Long because" in (ast.get_docstring(function) or "")
        assert length <= 60 or explained, f"{file} {function.name}: {length} lines"


def test_only_the_trainer_overrides_trl():
    overriding = [name_of(path) for path in FILES if "(GRPOTrainer)" in path.read_text(encoding="utf-8")]
    assert overriding == ["trainer.trainer", "trainer.trl_trainer"]
    # The second one is a type: it has annotations only.
    assert "def " not in (PACKAGE / "trainer" / "trl_trainer.py").read_text(encoding="utf-8")


def loaded(statements: str) -> set[str]:
    """Return the packages that are imported once the statements have run in an interpreter of their own."""
    program = f"{statements}\nimport sys\nprint(' '.join(name for name in sys.modules if '.' not in name))"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    return set(output.splitlines()[-1].split())


def imports(names: set[str]) -> str:
    return "\n".join(f"import grpo_math.{name}" for name in sorted(names) if not name.endswith("__main__"))


HELP = """
from contextlib import suppress
from grpo_math.cli import main
for words in (["--help"], ["grade", "--help"]):
    with suppress(SystemExit):
        main(words)
"""


@pytest.mark.slow
@pytest.mark.parametrize("statements", [HELP, imports(NAMES - TORCH - ELSEWHERE)], ids=["help", "light modules"])
def test_help_and_the_light_modules_load_nothing_heavy(statements):
    assert not loaded(statements) & {"torch", "transformers", "trl", "datasets", "sympy", "matplotlib", "numpy"}


@pytest.mark.slow
def test_the_pure_modules_load_no_trl():
    assert "trl" not in loaded(imports(TORCH - TRL))


COLLECTIVES = {
    *("gather_object", "broadcast_object_list", "all_reduce", "all_to_all_single", "wait_for_everyone", "barrier"),
    *("ranks.gather", "accelerator.reduce"),
}
PREFIXES = ("gather_", "reduce_", "agree_", "broadcast_")
# Every rank runs these from top to bottom, or there is one rank, or TRL, transformers and Python give the names.
EVERY_RANK = {"train.program", "trainer.trainer", "checks.selftest"}
NAMED_BY_OTHERS = re.compile(r"__\w+__|on_\w+|_init_vllm|generate")


def waiting_calls(function: ast.FunctionDef) -> set[str]:
    """Return the names of what a function calls that waits for all ranks."""
    calls = [ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)]
    names = {".".join(call.split(".")[-2:]) for call in calls} | {call.rpartition(".")[2] for call in calls}
    return {name for name in names if name in COLLECTIVES or name.lstrip("_").startswith(PREFIXES)}


def test_each_test_whose_seconds_are_known_exists():
    for name in SECONDS:
        file, function = name.split("[")[0].split("::")
        assert f"def {function}(" in (PACKAGE.parent / file).read_text(encoding="utf-8"), name


def test_a_function_says_that_all_ranks_must_call_it():
    """Its name does, or else its docstring, also if it waits for them in a function that it calls."""
    for file, function in functions():
        if file not in EVERY_RANK and not NAMED_BY_OTHERS.fullmatch(function.name):
            says = function.name.lstrip("_").startswith(PREFIXES)
            says = says or "All ranks call" in (ast.get_docstring(function) or "")
            assert says or not waiting_calls(function), f"{file} {function.name} calls {waiting_calls(function)}"

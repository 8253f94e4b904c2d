"""The structure: imports point downward, the light parts stay light, and the README's tree is the folder."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "grpo_math"
LAYERS = [
    {"cli"},
    {"launcher", "doctor"},
    {"deep_checks"},
    {"train", "bench"},
    {"hub"},
    {"model_card"},
    {"trainer", "run_log", "trackers", "evaluation", "difficulty", "report", "peers"},
    {"checks"},
    {"backends", "resume", "disk", "generation_kwargs"},
    {"rollout", "models", "reference", "vllm_sync", "fingerprint"},
    {"contamination", "config", "data", "problems"},
    {
        "rewards",
        "advantages",
        "losses",
        "arrange",
        "resample",
        "attention",
        "decoding",
        "rows",
        "packing",
        "longest",
        "nonfinite",
        "adapters",
    },
    {"grading", "planner"},
    {"stats", "metrics", "prompts", "batch", "redact", "vllm_server", "journal", "recipe", "lock", "main_process"},
    {"shipped"},
    {"ranks"},
    {"errors", "keeper", "signals", "watchdog"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
NO_TORCH = [
    "cli",
    "launcher",
    "shipped",
    "keeper",
    "ranks",
    "signals",
    "doctor",
    "recipe",
    "arrange",
    "resample",
    "data",
    "problems",
    "rewards",
    "grading",
    "planner",
    "report",
    "hub",
    "model_card",
    "checks",
    "checks.preflight",
    "stats",
    "metrics",
    "prompts",
    "batch",
    "redact",
    "shipped",
    "vllm_server",
    "journal",
    "disk",
    "lock",
    "watchdog",
    "contamination",
    "fingerprint",
    "resume",
    "errors",
]
NO_TRL = [
    "adapters",
    "advantages",
    "losses",
    "packing",
    "rows",
    "longest",
    "nonfinite",
    "attention",
    "rollout",
    "reference",
    "models",
    "evaluation",
    "backends",
    "stats",
]


def modules() -> list[tuple[str, Path]]:
    """(module of a layer, file) of the package; a package such as grading counts as one."""
    return [
        (path.relative_to(PACKAGE).parts[0].removesuffix(".py"), path)
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE) != Path("__init__.py")
    ]


def imported(path: Path) -> set[str]:
    """The modules of this package that a file imports, wherever in the file."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module] if node.module != "grpo_math" else [f"grpo_math.{a.name}" for a in node.names]
    return {name.split(".")[1] for name in names if name.startswith("grpo_math.") and name.count(".") >= 1}


def test_every_module_has_a_layer_and_no_layer_names_what_is_gone():
    assert {name for name, _ in modules()} == set(LEVEL)


@pytest.mark.parametrize(("name", "path"), modules(), ids=lambda value: str(value) if isinstance(value, str) else "")
def test_imports_point_downward(name, path):
    upward = {
        other
        for other in imported(path) - {name, "__version__"}
        if LEVEL[other] < LEVEL[name] or (LEVEL[other] == LEVEL[name] and (other, name) in CYCLES)
    }
    assert not upward, f"{path.name} imports {upward}, which stands above it"


CYCLES = {
    (a, b) for (a, pa) in modules() for (b, pb) in modules() if a != b and b in imported(pa) and a in imported(pb)
}


def test_no_two_modules_import_each_other():
    assert not CYCLES


def test_only_the_trainer_overrides_trl():
    for name, path in modules():
        text = path.read_text(encoding="utf-8")
        assert ("(GRPOTrainer)" in text) == (name == "trainer"), path


def loaded_by(statement: str) -> set[str]:
    program = f"{statement}\nimport sys\nprint(' '.join(m for m in sys.modules if '.' not in m))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split("\n")[-2].split())


@pytest.mark.parametrize("name", NO_TORCH)
def test_the_light_modules_load_neither_torch_nor_transformers_nor_trl(name):
    assert not loaded_by(f"import grpo_math.{name}") & {"torch", "transformers", "trl", "datasets", "sympy"}


@pytest.mark.parametrize("name", NO_TRL)
def test_the_pure_modules_load_no_trl(name):
    assert not loaded_by(f"import grpo_math.{name}") & {"trl"}


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
        "assert callable(evaluate) and callable(grade) and REWARDS['accuracy']"
    )
    subprocess.run([sys.executable, "-c", program], check=True)

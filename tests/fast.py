"""What `./launch/test.sh --fast` runs: the tests of `CORE`, and all of each light file but what is marked slow.

A file is light when importing it loads none of HEAVY. That is read from import statements, its own and those of the
files of this repository that it imports, without running them: what is neither light nor has a core test is not even
imported. A light test that asks for a model (a fixture of `MODELS`) counts as slow.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "transformers", "trl", "peft", "datasets", "accelerate", "safetensors", "pandas"}
MODELS = {"smollm", "tokenizer", "tiny"}
CORE = (  # the beginnings of their ids; one for each promise, and seconds of CPU
    "tests/trainer/test_trl_contract.py",  # TRL's names are where we override them
    "tests/trainer/test_advantages.py::test_",
    "tests/trainer/test_equivalence.py::test_five_steps_end_with_trls_weights[dense-kl]",
    "tests/trainer/test_equivalence.py::test_packed_scoring_gives_trls_log_probs_entropies_and_gradients[many",
    "tests/trainer/test_equivalence.py::test_a_token_budget_changes_no_weight[dense-dapo-20]",
    "tests/trainer/test_reference_training.py::test_five_steps_of_adamw_give_the_weights_of_the_formulas",
    "tests/generation/test_decoding.py::test_tokens_and_generator_are_those_of_plain_generate",
    "tests/generation/test_vllm_restarts.py::test_a_server_that_restarts_gets_the_adapter_again_and_no_batch_is_lost",
    "tests/report/test_report.py::test_the_headline_says_by_how_much_and_how_sure",
    "tests/report/test_report.py::test_the_plots_are_pngs_and_the_page_carries_its_own",
    "tests/report/test_report.py::test_hostile_text_never_becomes_markup",
    "tests/train/test_earlier_runs.py",  # 0.1.0's killed run goes on bit by bit, reports and compares
    "tests/run/test_signals.py::test_what_started_the_ranks_passes_a_signal_on_and_ends_with_its_code[grpo_math.train.r"
    "anks-10-zero2]",  # two processes under ZeRO-2
    "tests/test_cli.py::test_the_demo_trains_a_step_and_reports",
)


@cache
def imports(path: Path) -> set[str]:
    """The names that importing a file imports: not what its functions do when they are called."""
    names: set[str] = set()
    left: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            left += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            left += ast.iter_child_nodes(node)
    return names


def files_of(name: str) -> Iterator[Path]:
    """The files of this repository that `import name` runs: those of the packages above it too."""
    parts = name.split(".")
    for n in range(1, len(parts) + 1):
        for folder in (ROOT, ROOT / "tests"):
            stem = folder.joinpath(*parts[:n])
            yield from (path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file())


@cache
def light(path: Path) -> bool:
    seen, left = set(), {path}
    while left:
        seen |= left
        names = {name for file in left for name in imports(file)}
        if {name.partition(".")[0] for name in names} & HEAVY:
            return False
        left = {file for name in names for file in files_of(name)} - seen
    return True


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path.suffix != ".py" or str(collection_path.relative_to(ROOT)) in {
        i.partition("::")[0] for i in CORE
    }:
        return None
    return None if light(collection_path) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def kept(item: pytest.Item) -> bool:
        slow = item.get_closest_marker("slow") or MODELS & set(getattr(item, "fixturenames", ()))
        return item.nodeid.startswith(CORE) or (light(item.path) and not slow)

    files = {item.nodeid.partition("::")[0] for item in items}
    for core in CORE:
        if core.partition("::")[0] in files and not any(item.nodeid.startswith(core) for item in items):
            raise pytest.UsageError(f"tests/fast.py names a core test that is not there: {core}")
    config.hook.pytest_deselected(items=[item for item in items if not kept(item)])
    items[:] = [item for item in items if kept(item)]

"""`grpo-math selftest`: train stock TRL and this package side by side on the installed versions, and compare.

Needs no network, no data and no checkout. Run it after an update of torch, transformers or TRL, and on a new kind of
GPU. After it has passed, a run warns no more about the functions that it has run (trainer/contract.py).
"""

import argparse
import cProfile
import gc
import importlib.metadata
import io
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from functools import cache
from typing import Any

from grpo_math.errors import ConfigError, first_line
from grpo_math.run.bar import transformers_bars
from grpo_math.system.addresses import is_address
from grpo_math.system.gpus import use_one_gpu
from grpo_math.system.machine import SLEEPING_THREADS, hardware, versions
from grpo_math.system.replaced import replaced
from grpo_math.system.streams import Answer
from grpo_math.trainer import contract

SHOWN = ("torch", "trl", "transformers", "accelerate", "peft", "grpo_math")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", metavar="WORD", default="", help="only the checks whose name contains this word")
    parser.add_argument("--vllm", metavar="URL", help="also send adapters to this vLLM server, and compare log-probs")


@contextmanager
def _quiet() -> Iterator[None]:
    """Log no warnings, and spend no time on garbage (see `_rows`) and metadata.

    At the end of each training, transformers collects garbage, which looks at all imported objects. accelerate reads
    the metadata of peft whenever it unwraps a model. Together they would take half of the time.
    """
    logging.disable(logging.WARNING)
    try:
        with replaced(importlib.metadata, metadata=cache(importlib.metadata.metadata)):
            yield
    finally:
        gc.unfreeze()
        logging.disable(logging.NOTSET)


def run(args: argparse.Namespace) -> Answer:
    """Print each result at once, and answer with all of them."""
    if args.vllm and not is_address(args.vllm):
        raise ConfigError("vllm", args.vllm, "is not an address", "give http://HOST:PORT")
    contract.refuse()
    differences = [comparison.line for comparison in contract.untested()]
    os.environ.setdefault(*SLEEPING_THREADS)
    use_one_gpu()
    # These import torch and TRL, which takes seconds, and packages that print when they are imported.
    with redirect_stdout(sys.stderr):
        from grpo_math.checks.selftest import FIELDS, checks, in_float32

    rows: list[dict[str, Any]] = []
    # The profile shows which of the functions that differ are run.
    profile = cProfile.Profile(subcalls=False, builtins=False)
    with tempfile.TemporaryDirectory() as folder, in_float32(), _quiet(), transformers_bars(0):
        for row in _rows(_chosen([*checks(folder, args.vllm)], args.only), profile if differences else nullcontext()):
            rows.append(row)
            if not args.json:
                print(_line(row), flush=True)
    functions = {entry.code.co_qualname for entry in profile.getstats() if not isinstance(entry.code, str)}
    is_pass = all(row["ok"] for row in rows) and not args.only
    return _answer(rows, differences, _remember_pass(FIELDS | functions) if is_pass else "")


def _rows(checks: list[Any], profile: AbstractContextManager[Any]) -> Iterator[dict[str, Any]]:
    """Yield the result of each check. If stock TRL cannot train here, the other checks that train are left out."""
    from grpo_math.checks.selftest import CannotTrain

    trains = True
    for check in checks:
        if "training" in check.name and not trains:
            continue
        # Exempt all objects that are imported by now from garbage collection, and keep nothing of the check before.
        gc.collect()
        gc.freeze()
        started, measured, note = time.perf_counter(), math.inf, ""
        try:
            with redirect_stdout(io.StringIO()) as output, redirect_stderr(output), profile:
                result = check.measure()
            measured, note = result if isinstance(result, tuple) else (result, "")
        except CannotTrain as error:
            trains, note = False, str(error)
        # A version that does not fit may raise anything, and the other checks show how much of it works.
        except Exception as error:
            note = f"{type(error).__name__}: {first_line(error)}"
        yield {
            "what": check.name,
            "expected": check.expected,
            "limit": check.limit,
            "measured": measured if math.isfinite(measured) else None,
            "ok": measured <= check.limit,
            "note": note,
            "seconds": round(time.perf_counter() - started, 1),
        }


def _answer(rows: list[dict[str, Any]], differences: list[str], unsaved: str) -> Answer:
    """Return all results, and in words the versions, the machine and how many checks deviate."""
    installed = {name: versions()[name] for name in SHOWN if name in versions()}
    machine = hardware()
    device = machine.get("gpu") or f"CPU, {machine['threads']} threads"
    deviate = sum(not row["ok"] for row in rows)
    verdict = f"not ok: {deviate} of {len(rows)} checks deviate" if deviate else f"ok: as TRL and transformers{unsaved}"
    text = "\n".join([*differences, f"{', '.join(map(' '.join, installed.items()))}; {device}", verdict])
    answer = {"ok": not deviate, "checks": rows, "untested": differences, "versions": installed, "machine": machine}
    return Answer(answer, text, not deviate)


def _chosen(checks: list[Any], word: str) -> list[Any]:
    chosen = [check for check in checks if word in check.name]
    if not chosen:
        names = " | ".join(check.name for check in checks)
        raise ConfigError("only", word, "is in the name of no check", f"use a word of {names}")
    return chosen


def _remember_pass(tried: set[str]) -> str:
    """End the warnings about what was tried. Return "", or words about a file that cannot be written."""
    try:
        contract.remember(tried)
    except OSError as error:
        return f" (runs go on warning, because {error.filename} cannot be written: {error.strerror})"
    return ""


def _line(row: dict[str, Any]) -> str:
    measured = "-" if row["measured"] is None else f"{row['measured']:.2g}"
    columns = f"{row['what']:<36} {row['expected']:<24} {measured:>8}, at most {row['limit']:<6.3g}"
    return f"{columns} {'ok' if row['ok'] else 'NOT OK':<6} {row['seconds']:4.1f} s  {row['note']}".rstrip()

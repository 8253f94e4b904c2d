"""Runs the programs that a confined process is sent, one after the other, each as a Python prompt would.

What it prints goes to file 1, with the value of a last line that is an expression, or the last line of its error. Names
stay from one program to the next. After each program a byte goes back: 1 where it ran to its end, 0 where it raised.

Does not confine anything: by now the process is.
"""

import ast
import builtins
import io
import os
import random
import socket
import sys
import traceback
from types import ModuleType
from typing import Any

from grpo_math.grading.frames import decode


def serve(control: socket.socket) -> None:
    """Run what arrives until the other end closes."""
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = [""]
    _prepare()
    buffer = bytearray()
    while (message := _received(control, buffer)) is not None:
        done = run(message["code"], module.__dict__)
        control.send(b"1" if done else b"0")


def run(code: str, names: dict[str, Any]) -> bool:
    """Did it run to its end?

    >>> run("x = 6\\nx * 7", names := {}), names["x"]
    42
    (True, 6)
    >>> run("1 / 0", {})
    ZeroDivisionError: division by zero
    False
    """
    done = True
    try:
        tree = ast.parse(code)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<program>", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<program>", "eval"), names)
            if value is not None:
                print(repr(value))
    except SystemExit as error:
        done = error.code in (None, 0)
    except BaseException as error:
        done = False
        _say(error)
    try:
        sys.stdout.flush()
    except BaseException:
        done = False
    return done


def _say(error: BaseException) -> None:
    try:
        lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
        print(lines[-1] if lines else type(error).__name__)
    except BaseException:
        builtins.print(type(error).__name__)


def _prepare() -> None:
    """Output as text whatever is printed; the same random numbers in each program, so that a run can be repeated."""
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb"), "utf-8", "backslashreplace", line_buffering=True)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    sys.stdin = open(os.devnull)  # noqa: SIM115
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def _received(control: socket.socket, buffer: bytearray) -> dict[str, Any] | None:
    while (message := decode(buffer)) is None:
        chunk = control.recv(65536)
        if not chunk:
            return None
        buffer += chunk
    return message

"""Runs the programs that a confined process is sent, one after the other, each as a Python prompt would.

What it prints goes to file 1, with the value of a last line that is an expression, or the last line of its error. Names
stay from one program to the next. After each program a byte goes back: 1 where it ran to its end, 0 where it raised.

Does not confine anything: by now the process is.
"""

import ast
import random
import socket
import sys
import traceback
from types import ModuleType
from typing import Any, TextIO

from grpo_math.grading.frames import decode


def serve(control: socket.socket) -> None:
    """Run what arrives until the other end closes."""
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = [""]
    random.seed(0)  # the same in each program, so that a run can be repeated
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    out: Any = sys.stdout
    out.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    buffer = bytearray()
    while (message := _received(control, buffer)) is not None:
        done = run(message["code"], module.__dict__, out)
        control.send(b"1" if done else b"0")


def run(code: str, names: dict[str, Any], out: TextIO) -> bool:
    """Did it run to its end?

    >>> run("x = 6\\nx * 7", names := {}, sys.stdout), names["x"]
    42
    (True, 6)
    >>> run("1 / 0", {}, sys.stdout)
    ZeroDivisionError: division by zero
    False
    """
    done, sys.stdout = True, out
    try:
        tree = ast.parse(code)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, "<program>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<program>", "eval"), names)
            if value is not None:
                print(repr(value))
    except SystemExit as error:
        done = error.code in (None, 0)
    except BaseException as error:
        done = False
        out.write(_last_line(error))
    out.flush()
    return done


def _last_line(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception_only(error)).strip().splitlines()[-1] + "\n"
    except BaseException:
        return f"{type(error).__name__}\n"


def _received(control: socket.socket, buffer: bytearray) -> dict[str, Any] | None:
    while (message := decode(buffer)) is None:
        chunk = control.recv(65536)
        if not chunk:
            return None
        buffer += chunk
    return message

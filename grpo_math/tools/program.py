"""Run the programs that a sandboxed process receives, one after the other, like a Python prompt.

Output goes to file descriptor 1: the program's output, then the value of its last line if that is an expression, or the
last line of its error. Variables stay from one program to the next. After each program one byte goes back: 1 if the
program ran to its end, 0 if it raised.

Does not enter the sandbox: the process is already in it.
"""

import ast
import json
import random
import socket
import sys
import traceback
from types import ModuleType
from typing import Any, TextIO


def serve(control: socket.socket) -> None:
    """Run each JSON line that arrives, until the other end closes."""
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = [""]
    random.seed(0)  # the same in each program, so that a run can be repeated
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    out = open(1, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    for line in control.makefile("rb"):
        done = run(json.loads(line), module.__dict__, out)
        control.send(b"1" if done else b"0")


def run(code: str, names: dict[str, Any], out: TextIO) -> bool:
    """Run a program; return True if it ran to its end.

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
        shown = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
        exec(compile(tree, "<program>", "exec"), names)
        exec(compile(ast.Interactive(shown), "<program>", "single"), names)  # prints the value
    except SystemExit as error:
        done = error.code in (None, 0)
    except BaseException as error:
        done = False
        out.write("".join(traceback.format_exception_only(error)).strip().splitlines()[-1] + "\n")
    out.flush()
    return done

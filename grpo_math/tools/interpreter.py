"""Run one program as a Python prompt does: print its output, then the value of its last line if that is an expression.

If the program raises, the last line of the error is printed, and `sys.exit` prints its message.
"""

import ast
import random
import sys
import threading
import traceback
from types import ModuleType

RAISED = 100  # exit code of a program that raised


def run(code: str) -> int:
    """Run a program with its output on file descriptor 1. Return the exit code for its process."""
    # pickle and dataclasses look up the module of a class in `sys.modules`. Here it must be the program's module, and
    # not the server's.
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = [""]

    # The same in each program, so that a run can be repeated.
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    # Write line by line, so that a program that is killed later still shows its output. Lone surrogates are escaped,
    # because UTF-8 cannot encode them.
    out = sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115

    exit_code = 0
    try:
        tree = ast.parse(code)
        shown = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
        exec(compile(tree, "<program>", "exec"), module.__dict__)
        # "single" prints the value of an expression, as the prompt does.
        exec(compile(ast.Interactive(shown), "<program>", "single"), module.__dict__)
        # Threads that are not daemons may still print, as in an interpreter.
        threading._shutdown()  # type: ignore[attr-defined]
    except SystemExit as error:
        exit_code = 0 if error.code in (None, 0) else RAISED
        if not isinstance(error.code, int | None):  # sys.exit("no solution")
            out.write(f"{error.code}\n")
    except BaseException as error:
        exit_code = RAISED
        out.write("".join(traceback.format_exception_only(error)).strip().splitlines()[-1] + "\n")
    out.flush()
    return exit_code

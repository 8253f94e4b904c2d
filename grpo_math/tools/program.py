"""Run one program as a Python prompt does: print its output, then the value of its last line if that is an expression.

If the program raises, the last line of the error is printed.

Does not enter the sandbox: the process is already in it.
"""

import ast
import random
import sys
import traceback
from types import ModuleType

RAISED = 100  # exit code of a program that raised


def run(code: str) -> int:
    """Run a program with its output on file descriptor 1. Return the exit code for its process."""
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = [""]
    random.seed(0)  # the same in each program, so that a run can be repeated
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    out = sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    exit_code = 0
    try:
        tree = ast.parse(code)
        shown = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
        exec(compile(tree, "<program>", "exec"), module.__dict__)
        exec(compile(ast.Interactive(shown), "<program>", "single"), module.__dict__)  # prints the value
    except SystemExit as error:
        exit_code = 0 if error.code in (None, 0) else RAISED
    except BaseException as error:
        exit_code = RAISED
        out.write("".join(traceback.format_exception_only(error)).strip().splitlines()[-1] + "\n")
    out.flush()
    return exit_code

"""A tool of tests that calculates in this process."""

from grpo_math.errors import UserError


def python(code: str) -> str:
    """
    Calculate.

    Args:
        code: What to calculate.
    """
    if code == "machine":
        raise UserError("no more processes")
    if code == "slow":
        raise TimeoutError("10 seconds")
    return str(eval(code, {"__builtins__": {}}))

"""Tools that a model may call while it answers: sandboxed Python, and functions of the user.

>>> [tool] = read_tools(["python"], PythonLimits())
>>> tool.__name__, str(tool("x = 1234 * 5678\\nx"))
('python', '7006652')

Does not parse a model's calls, and does not add results to a conversation: generation/ does.
"""

from collections.abc import Callable, Sequence

from grpo_math.errors import as_config_error, require_choice
from grpo_math.system.user_functions import is_user_function, load_function
from grpo_math.tools.limits import PythonLimits, read_limits
from grpo_math.tools.python import Answer, ToolError, call

__all__ = ["Answer", "PythonLimits", "ToolError", "call", "read_limits", "read_tools", "tool_limits"]

Tool = Callable[..., str]


def read_tools(names: Sequence[str], limits: PythonLimits) -> list[Tool]:
    """Return the tools of these names: ``python``, or ``module:function``. Raises `ConfigError`.

    >>> read_tools(["pyhton"], PythonLimits())
    Traceback (most recent call last):
    ...
    grpo_math.errors.ConfigError: tools='pyhton' is not known: did you mean 'python'? (python)
    """
    tools = []
    for name in names:
        if is_user_function(name):
            tools.append(_user_function(name))
        else:
            require_choice("tools", name, ("python",))
            tools.append(_python(limits))
    return tools


def _python(limits: PythonLimits) -> Tool:
    # The model reads this: the chat template shows it the name, the type hints and the docstring.
    def python(code: str) -> str:
        """Run a Python program and return what it prints.

        Args:
            code: The program. The value of its last line is printed too.
        """
        return call(code, limits)

    python._limits = limits  # type: ignore[attr-defined]
    return python


def tool_limits(tool: Tool) -> PythonLimits | None:
    """Return the limits of a ``python`` tool, or None for a user function.

    >>> [tool] = read_tools(["python"], PythonLimits(cpu_seconds=3))
    >>> tool_limits(tool).cpu_seconds, tool_limits(len)
    (3, None)
    """
    return getattr(tool, "_limits", None)


def _user_function(name: str) -> Tool:
    """Load a user function, and check that the chat template can describe it to a model."""
    from transformers.utils import get_json_schema

    tool = load_function("tools", name)
    with as_config_error("tools", name, "cannot be shown to a model", "give it type hints and a docstring with Args:"):
        get_json_schema(tool)
    return tool

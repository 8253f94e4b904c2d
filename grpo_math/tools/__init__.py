"""What a model may call while it answers: Python in a process of its own, and functions of one's own.

>>> [tool] = read_tools(["python"], PythonLimits())
>>> tool.__name__, str(tool("x = 1234 * 5678\\nx"))
('python', '7006652')

Does not read a model's calls and does not put answers into a conversation: the loop does.
"""

from collections.abc import Callable, Sequence

from grpo_math.errors import ConfigError, one_of
from grpo_math.run.own import is_own, load_function
from grpo_math.tools.limits import PythonLimits, as_mapping, read_limits
from grpo_math.tools.python import Answer, PythonSession, ToolError, call, python_many, shutdown, together

__all__ = [
    "Answer", "PythonLimits", "PythonSession", "ToolError", "as_mapping", "environment", "limits_of", "python_many",
    "read_limits", "read_tools", "shutdown", "together",
]  # fmt: skip

Tool = Callable[..., str]


def read_tools(names: Sequence[str], limits: PythonLimits) -> list[Tool]:
    """The tools of these names: ``python``, or ``module:function``. Raises `ConfigError`.

    With ``limits.session`` ``python`` is left out: it is a method of each completion's `environment`.

    >>> read_tools(["pyhton"], PythonLimits())
    Traceback (most recent call last):
    ...
    grpo_math.errors.ConfigError: tools='pyhton' is not known: did you mean 'python'? (python)
    """
    tools = []
    for name in names:
        if is_own(name):
            tools.append(_own(name))
            continue
        one_of("tools", name, ("python",))
        if not limits.session:
            tools.append(_python(limits))
    called = [tool.__name__ for tool in tools] + ["python"] * ("python" in names and limits.session)
    for name in called:
        if called.count(name) > 1:
            raise ConfigError("tools", list(names), f"has two tools called {name}", "rename one, or leave one out")
    return tools


def environment(names: Sequence[str], limits: PythonLimits) -> Callable[[], PythonSession] | None:
    """TRL's ``environment_factory`` for these tools; None where no state is kept.

    >>> environment(["python"], PythonLimits()) is None, environment(["python"], PythonLimits(session=True)) is None
    (True, False)
    """
    return (lambda: PythonSession(limits)) if limits.session and "python" in names else None


def _python(limits: PythonLimits) -> Tool:
    def python(code: str) -> str:
        """Run a Python program and return what it prints.

        Args:
            code: The program. The value of its last line is printed too.
        """
        return call(code, limits)

    python._limits = limits  # type: ignore[attr-defined]
    return python


def limits_of(tool: Tool) -> PythonLimits | None:
    """What `read_tools`' ``python`` runs under, or an environment's; None for a function of the user's own.

    >>> [tool] = read_tools(["python"], PythonLimits(cpu_seconds=3))
    >>> limits_of(tool).cpu_seconds, limits_of(PythonSession().python).session, limits_of(len)
    (3, True, None)
    """
    return getattr(getattr(tool, "__self__", tool), "_limits", None)


def _own(name: str) -> Tool:
    """A function of the user's own, with what a model has to be told of it."""
    from transformers.utils import get_json_schema

    tool = load_function("tools", name)
    try:
        get_json_schema(tool)
    except Exception as error:
        reason = f"cannot be shown to a model ({' '.join(str(error).split())[:200]})"
        raise ConfigError("tools", name, reason, "give it type hints and a docstring with Args:") from None
    return tool

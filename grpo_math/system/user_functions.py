"""Functions of the user, which a setting names as ``module:function``."""

import asyncio
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

from grpo_math.errors import ConfigError, UserError, nearest_name
from grpo_math.redact import one_line

# torch, because TRL and transformers decorate methods with ``torch.no_grad()``.
PACKAGES = ("trl", "transformers", "peft", "grpo_math", "torch")


def is_foreign(function: Any, packages: tuple[str, ...] = PACKAGES) -> bool:
    """Return True if a function, or one that it wraps, is not code of these packages.

    >>> is_foreign(load_function), is_foreign(lambda: None)
    (False, False)
    >>> is_foreign(print), is_foreign(inspect.unwrap)
    (True, True)
    """
    # A partial function has the attribute ``func``.
    functions = [getattr(one, "func", one) for one in (function, inspect.unwrap(function))]
    modules = [getattr(one, "__globals__", {}).get("__name__", "") for one in functions]
    return any(name.partition(".")[0] not in packages for name in modules)


def is_user_function(name: str) -> bool:
    """Return True if a setting names a function of the user, ``module:function``.

    >>> is_user_function("my_module:max_rl"), is_user_function("group_mean")
    (True, False)
    """
    return ":" in name


def load_function(field: str, name: str) -> Callable[..., Any]:
    """Import the function of that name, from the path or the current folder.

    >>> load_function("baseline", "math:sqrt")(9.0)
    3.0
    >>> load_function("baseline", "math:cqrt")
    Traceback (most recent call last):
    ...
    grpo_math.errors.ConfigError: baseline='math:cqrt' names no function of math: use one of its functions: ...
    """
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:
        # The current folder is last, so that a file here does not hide an installed package.
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    # A script without a main guard may call sys.exit() when it is imported.
    except (Exception, SystemExit) as error:
        reason = f"names a module that cannot be imported ({format_exception(error)})"
        files = {path.stem for path in Path().glob("*.py")} - {module_name}
        near = nearest_name(module_name, files)
        remedy = f"did you mean {near}:{function_name}?" if near else "write module:function, module as in an import"
        raise ConfigError(field, name, reason, remedy) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        have = ", ".join(n for n, f in vars(module).items() if inspect.isfunction(f) and not n.startswith("_"))
        reason = f"names no function of {module_name}"
        raise ConfigError(field, name, reason, f"use one of its functions: {have or 'it has none'}")
    return function


def tensor_from(field: str, name: str, sample: Any, *arguments: Any) -> Any:
    """Call the function. Raises `ConfigError` unless it returns a tensor of the shape of ``sample``."""
    result = load_function(field, name)(*arguments)
    shape, expected = getattr(result, "shape", None), sample.shape
    if shape != expected:
        kind = f"a {type(result).__name__}" if shape is None else f"a tensor of shape {tuple(shape)}"
        raise ConfigError(
            field, name, f"returned {kind}", f"return a tensor of shape {tuple(expected)}, as it was given"
        )
    return result


def call_on_example(field: str, name: str, sample: Any, *arguments: Any) -> Any:
    """Call `tensor_from` before training, on a small example. Any exception becomes a `ConfigError`."""
    try:
        return tensor_from(field, name, sample, *arguments)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        remedy = f"it is called with {len(arguments)} tensor{'s' * (len(arguments) > 1)} of shape {tuple(sample.shape)}"
        raise ConfigError(field, name, f"raised {format_exception(error)} on a small example", remedy) from error


def start(coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
    """Run an async function of the user in a thread. A notebook's own loop may be running in this one.

    >>> import asyncio
    >>> start(asyncio.sleep(0, "slept")).result()
    'slept'
    """
    result = Future[Any]()

    async def run() -> None:
        try:
            result.set_result(await coroutine)
        # A SystemExit would end the loop, and everything that waits for it would wait forever.
        except BaseException as error:
            result.set_exception(error)

    asyncio.run_coroutine_threadsafe(run(), event_loop())
    return result


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return one loop for all calls, because a client of a call cannot be used in another loop."""
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, daemon=True).start()
    return loop


# A forked process does not have the thread.
os.register_at_fork(after_in_child=event_loop.cache_clear)


def format_exception(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error)}"

"""Find what a script has changed in a model: hooks, forward methods, modules, attention.

A script may change a model at any step. `model_state` is compared in each step. If it differs, everything that depends
on the model is decided again (trainer/row_scorer.py).
"""

import dis
from collections.abc import Iterable, Iterator
from itertools import pairwise
from types import CodeType
from typing import Any

from torch.nn.modules import module as torch_module

from grpo_math.packing import attention
from grpo_math.system.user_functions import PACKAGES, is_foreign

# wandb's hooks read gradients.
LIBRARIES = (*PACKAGES, "accelerate", "deepspeed", "wandb")
FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
BACKWARD_HOOKS = ("_backward_pre_hooks", "_backward_hooks")
PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def model_state(models: Iterable[Any]) -> list[Any]:
    """Return a value that is another one if a script has changed how these models compute.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    >>> before = model_state([model])
    >>> hook = model[1].register_forward_hook(print)
    >>> model_state([model]) == before
    False
    >>> hook.remove()
    >>> model_state([model]) == before
    True
    """
    modules = [module for model in models for module in model.modules()]
    name = "_attn_implementation"
    return [
        [_numbers(_global_hooks(kind)) for kind in (*FORWARD_HOOKS, *BACKWARD_HOOKS)],
        [attention.registered()],
        # The objects and not their ids, which another object may get later.
        *(
            (
                module,
                *_forwards(module),
                vars(module).get("_compiled_call_impl"),
                getattr(vars(module).get("config"), name, None),
                *(_numbers(getattr(module, kind)) for kind in (*FORWARD_HOOKS, *BACKWARD_HOOKS)),
                *(_numbers(hooks) for hooks in _parameter_hooks(module)),
            )
            for module in modules
        ),
    ]


def _forwards(module: Any) -> tuple[Any, Any]:
    """Return the forward method of a module's class, and one of the module itself or None."""
    return type(module).forward, vars(module).get("forward")


def _global_hooks(kind: str) -> Any:
    return getattr(torch_module, f"_global{kind}")


def _parameter_hooks(module: Any) -> Iterator[Any]:
    for parameter in module._parameters.values():
        for kind in PARAMETER_HOOKS if parameter is not None else ():
            # None if a parameter never had a hook.
            yield getattr(parameter, kind, None) or {}


def _numbers(hooks: Any) -> list[int]:
    """Return the numbers of hooks, which torch gives once, without those that libraries add and remove again."""
    return [number for number, hook in hooks.items() if hook is attention.only_scored or is_foreign(hook, LIBRARIES)]


def is_altered(module: Any) -> bool:
    """Return True if code of a script runs in a module's passes: a hook or a forward method that is no library's.

    >>> from torch import nn
    >>> module = nn.ReLU()
    >>> before, _ = is_altered(module), module.register_forward_hook(print)
    >>> before, is_altered(module)
    (False, True)
    """
    hooks = (hook for kind in (*FORWARD_HOOKS, *BACKWARD_HOOKS) for hook in _hooks(module, kind))
    return any(is_foreign(one, LIBRARIES) for one in (*hooks, *filter(None, _forwards(module))))


def _hooks(module: Any, kind: str) -> list[Any]:
    return [*getattr(module, kind).values(), *_global_hooks(kind).values()]


def changes_gradients(models: Iterable[Any]) -> bool:
    """Return True if a script's hook may change gradients, or use them, once in each backward pass.

    Such a hook need not be linear: then the sum of the gradients of other micro-batches would be another one.

    >>> from torch import nn
    >>> model = nn.Linear(1, 1)
    >>> _ = model.register_forward_hook(print)
    >>> changes_gradients([model])
    False
    >>> _ = model.bias.register_hook(print)
    >>> changes_gradients([model])
    True
    """
    for module in (module for model in models for module in model.modules()):
        if any(map(_numbers, _parameter_hooks(module))):
            return True
        for kind in (*FORWARD_HOOKS, *BACKWARD_HOOKS):
            for hook in _hooks(module, kind):
                if is_foreign(hook, LIBRARIES) and not _keeps_gradients(hook, kind in BACKWARD_HOOKS):
                    return True
    return False


def _keeps_gradients(hook: Any, is_backward: bool) -> bool:
    """Return True if a module's hook changes no gradient, according to its code.

    A hook that returns nothing changes none, unless it calls a method in place or registers a hook on a tensor.

    >>> _keeps_gradients(lambda module, args: args, is_backward=False)
    True
    >>> _keeps_gradients(lambda module, args: args, is_backward=True)
    False
    >>> _keeps_gradients(lambda module, args: args[0].register_hook(print) and None, is_backward=False)
    False
    """
    code = getattr(hook, "__code__", None)
    # A partial function or another object with `__call__`.
    if code is None:
        return not is_backward
    names = {name for part in (code, *code.co_consts) if isinstance(part, CodeType) for name in part.co_names}
    if "register_hook" in names:
        return False
    in_place = any(name.endswith("_") and not name.endswith("__") for name in names)
    return not is_backward or (not in_place and _returns_nothing(code))


def _returns_nothing(code: CodeType) -> bool:
    steps = list(dis.get_instructions(code))
    returned = [before.argval for before, step in pairwise(steps) if step.opname == "RETURN_VALUE"]
    loaded = {before.opname for before, step in pairwise(steps) if step.opname == "RETURN_VALUE"}
    # From Python 3.12 on, one instruction.
    returned += [step.argval for step in steps if step.opname == "RETURN_CONST"]
    return loaded <= {"LOAD_CONST"} and not any(value is not None for value in returned)

"""Find what a script has changed in a model: hooks, forward methods, modules, attention.

A script may change a model at any step. `model_state` is compared in each step. If it differs, everything that depends
on the model is decided again (trainer/row_scorer.py).
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch.nn.modules import module as torch_module

from grpo_math.packing import attention
from grpo_math.system.user_functions import PACKAGES, is_foreign

# Their hooks and methods treat each token, or each gradient, by itself. wandb's hooks read gradients.
LIBRARIES = (*PACKAGES, "accelerate", "bitsandbytes", "deepspeed", "liger_kernel", "wandb")
MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
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
    name = "_attn_implementation"
    return [
        attention.registered(),
        # The objects and not their ids, which another object may get later.
        *(
            (
                module,
                type(module).forward,
                vars(module).get("forward"),
                vars(module).get("_compiled_call_impl"),
                getattr(vars(module).get("config"), name, None),
                # The numbers of hooks, which torch gives once, without those that libraries add and remove again.
                *(
                    number
                    for hooks in _hooks(module)
                    for number, hook in hooks.items()
                    if hook is attention.only_scored or is_foreign(hook, LIBRARIES)
                ),
            )
            for model in models
            for module in model.modules()
        ),
    ]


def _hooks(module: Any) -> Iterator[Any]:
    """Yield the hooks that run in a module's passes: those of all modules, of this one, and of its parameters."""
    for kind in MODULE_HOOKS:
        yield getattr(torch_module, f"_global{kind}")
        yield getattr(module, kind)
    for parameter in module._parameters.values():
        for kind in PARAMETER_HOOKS if parameter is not None else ():
            # None if a parameter never had a hook.
            yield getattr(parameter, kind, None) or {}


def runs_script(module: Any) -> bool:
    """Return True if a hook of a script, or a forward method that it gave this module, runs in a pass.

    Such code may depend on the rows of a pass, or change the gradient of each pass.

    >>> from functools import partial
    >>> from torch import nn
    >>> module = nn.Linear(1, 1)
    >>> hook = module.register_full_backward_hook(partial(is_foreign))
    >>> before, _ = runs_script(module), module.bias.register_hook(print)
    >>> before, runs_script(module)
    (False, True)
    """
    code = [hook for hooks in _hooks(module) for hook in hooks.values()]
    code += [vars(module)["forward"]] if "forward" in vars(module) else []
    return any(is_foreign(one, LIBRARIES) for one in code)


def is_altered(module: Any) -> bool:
    """Return True if `runs_script`, or if the module's method is no library's."""
    return runs_script(module) or is_foreign(type(module).forward, LIBRARIES)

"""What a file of torch.save would call when it is read, found without reading it.

Does not read a file that it lets pass: DeepSpeed does, as a whole pickle.
"""

import pickletools
from pathlib import Path
from typing import Any

import torch

GETATTR, STAGE = "builtins.getattr", "deepspeed.runtime.zero.config.ZeroStageEnum"
STAGES = ("disabled", "optimizer_states", "gradients", "weights", "max_stage")
# What the files of numpy's generator and of DeepSpeed name besides tensors and plain types.
HARMLESS = {
    *("deepspeed.runtime.fp16.loss_scaler.LossScaler", "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    *(STAGE, "deepspeed.utils.tensor_fragment.fragment_address"),
    *("numpy.dtype", "numpy.ndarray", "numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct"),
}


def code_in(file: Path) -> str | None:
    """What the file would call or make, or why that cannot be told; None for tensors, plain types and `HARMLESS`."""
    try:
        named = set(torch.serialization.get_unsafe_globals_in_checkpoint(file)) - HARMLESS
        if GETATTR in named and _only_stages(torch._C.PyTorchFileReader(str(file)).get_record("data.pkl")):
            named.remove(GETATTR)
    except Exception as error:  # no file of torch.save's
        return type(error).__name__
    return ", ".join(sorted(named))[:200] or None


def _only_stages(pickle: bytes) -> bool:
    """Whether each getattr is called at once, for a member of DeepSpeed's enum: so Python 3.11.2 writes one.

    >>> begin, end = b"\\x80\\x02cbuiltins\\ngetattr\\n", b"\\x86R."
    >>> enum = b"cdeepspeed.runtime.zero.config\\nZeroStageEnum\\n"
    >>> _only_stages(begin + enum + b"X\\x07\\0\\0\\0weights" + end)
    True
    >>> _only_stages(begin + enum + b"X\\x05\\0\\0\\0__mro" + end), _only_stages(begin + b"cos\\nsystem\\n" + end)
    (False, False)
    """
    memo, seen = dict[Any, Any](), list[Any]()
    for opcode, value, _ in pickletools.genops(pickle):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[value] = seen[-1]
        elif opcode.name in ("MEMOIZE", "STACK_GLOBAL", "DUP"):  # of other protocols than torch.save's
            return False
        elif opcode.name in ("GET", "BINGET", "LONG_BINGET"):
            seen.append(memo[value])
        elif opcode.name == "GLOBAL":
            name = str(value).replace(" ", ".").replace("__builtin__", "builtins")  # as protocol 2 calls it
            seen.append((opcode.name, name))
        else:
            seen.append((opcode.name, value))
    members = [[("GLOBAL", GETATTR), ("GLOBAL", STAGE), ("BINUNICODE", stage)] for stage in STAGES]
    called = [("TUPLE2", None), ("REDUCE", None)]
    found = [number for number, what in enumerate(seen) if what == ("GLOBAL", GETATTR)]
    return bool(found) and all(seen[at : at + 5] in [member + called for member in members] for at in found)

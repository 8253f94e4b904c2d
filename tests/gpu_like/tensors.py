"""`Cuda`: a tensor that says `cuda:0` or `cuda:1` and holds a CPU tensor, and what an operator on it does.

Every operator that has such a tensor among its arguments comes to `_run`: it refuses devices that CUDA would refuse,
counts, and computes on the tensors within.

Does not support operators that change a tensor's shape in place.
"""

from functools import partial, partialmethod
from typing import Any

import flash_reference
import torch
from gpu_like.counting import waited
from torch.nn.attention.bias import CausalBias
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

DEVICE, CPU = torch.device("cuda", 0), torch.device("cpu")
# Operators whose result the CPU has to see before it can go on: a number, or a shape that depends on the data.
WAIT = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "bincount"}
WAIT |= {"_unique", "_unique2", "unique_dim", "unique_consecutive"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
# A number on the CPU may stand beside tensors on the device in what is computed element by element, and in these.
TAKE_NUMBERS = {"where", "fill_", "fill", "masked_fill", "masked_fill_", "index_fill", "index_fill_", *INDEXING}
# What every other way to make a tensor begins with, or would hand to an operator that gives it another shape.
FACTORIES = ("empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step", "eye", "eye.m")

LIBRARY = torch.library.Library("aten", "IMPL")  # one that is dropped takes its operators with it
_sdpa = torch.nn.functional.scaled_dot_product_attention


class Cuda(torch.Tensor):
    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device = DEVICE) -> "Cuda":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=device,
        )

    def __init__(self, inner: torch.Tensor, device: torch.device = DEVICE) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], torch.device]:  # by which `Module.to` takes parameters over
        return ["inner"], self.device

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], device: torch.device, size: Any, stride: Any) -> "Cuda":
        return Cuda(inner["inner"], device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def data(self) -> Any:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, other: Any) -> None:
        self.inner = other.inner
        torch.Tensor.data.__set__(self, other)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.inner.untyped_storage()._cdata if self.inner.is_meta else self.inner.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copy = Cuda(self.inner.detach().clone(), self.device)
            is_parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = torch.nn.Parameter(copy, self.requires_grad) if is_parameter else copy
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as a tensor of the CPU."""
        return self.inner.__reduce_ex__(protocol)

    def record_stream(self, stream: Any) -> None:
        """Nothing: memory is never handed on."""


def on(device: Any) -> torch.device:
    """The device with a number: ``cuda`` is the first."""
    device = torch.device(device)
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Apply an operator to what the tensors of the device hold. The simulation has another one."""
    return func(*args, **kwargs)


def heard(func: Any, args: Any, out: Any) -> None:
    """Called after every operator. The simulation counts memory here."""


def take_over() -> None:
    """For good: what makes a tensor on the device from none that is there begins with one of `FACTORIES`."""
    torch.nn.functional.scaled_dot_product_attention = attention
    module: Any = torch.nn.Module
    module.to = partialmethod(_to, module.to)
    flash_reference.register()
    for factory in FACTORIES:
        LIBRARY.impl(factory, partial(_made, factory), "CUDA")


def _made(factory: str, *args: Any, device: Any = None, **kwargs: Any) -> Cuda:
    name, _, overload = factory.partition(".")
    func = getattr(getattr(torch.ops.aten, name), overload or "default")
    made = Cuda(compute(func, args, {**kwargs, "device": CPU}), DEVICE if device is None else on(device))
    heard(func, args, made)
    return made


def _to(module: Any, plain: Any, *args: Any, **kwargs: Any) -> Any:
    """A module that is on the device stays as it is. Torch would replace its parameters, and their hooks with them."""
    to_device = len(args) == 1 and str(args[0]).startswith("cuda") and not kwargs
    if to_device and all(isinstance(tensor, Cuda) for tensor in (*module.parameters(), *module.buffers())):
        return module
    return plain(module, *args, **kwargs)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name, asked = func._schema.name.partition("::")[2], kwargs.get("device")
    inside = kwargs if asked is None else {**kwargs, "device": CPU}
    if name == "is_pinned":
        return False
    if name == "_to_copy":
        out = _to_copy(func, args, inside, asked)
    elif name == "copy_":
        out = _copy(func, args, inside)
    else:
        out = _computed(func, name, args, kwargs, inside)
    heard(func, args, out)
    return out


def _computed(func: Any, name: str, args: Any, kwargs: dict[str, Any], inside: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    device = next((tensor.device for tensor in tensors if isinstance(tensor, Cuda)), DEVICE)
    _refuse_mixed(func, name, args, tensors, device)
    if _waits(name, args, kwargs):
        waited()
    plain, inside = tree_map(within, (args, inside))
    if name == "addmm" and "dtype" in func._overloadname:  # CUDA alone has it: a product that is added up in float32
        out = plain[0] + plain[1].float() @ plain[2].float()
        if "out" in inside:
            inside["out"].copy_(out)
            return kwargs["out"]
        return Cuda(out, device)
    target = device if kwargs.get("device") is None else on(kwargs["device"])
    out = tree_map_only(torch.Tensor, lambda tensor: _placed(tensor, target), compute(func, plain, inside))
    return return_and_correct_aliasing(func, args, kwargs, out)


def _placed(inner: torch.Tensor, device: torch.device) -> torch.Tensor:
    return Cuda(inner, device) if device.type == "cuda" or inner.is_meta else inner


def within(value: Any) -> Any:
    return value.inner if isinstance(value, Cuda) else value


def _to_copy(func: Any, args: Any, inside: dict[str, Any], asked: Any) -> torch.Tensor:
    source = args[0]
    target = source.device if asked is None else on(asked)
    if target != source.device and not inside.get("non_blocking"):
        waited()
    return _placed(compute(func, (within(source), *args[1:]), inside), target)


def _copy(func: Any, args: Any, inside: dict[str, Any]) -> torch.Tensor:
    target, source, *others = args
    non_blocking = inside.get("non_blocking") or (others and others[0])
    if target.device != source.device and not non_blocking:
        waited()
    compute(func, (within(target), within(source), *others), inside)
    return target


def _refuse_mixed(func: Any, name: str, args: Any, tensors: list[torch.Tensor], device: torch.device) -> None:
    for tensor in tensors:
        if tensor.device == device:
            continue
        here = not isinstance(tensor, Cuda)
        if here and tensor.dim() == 0 and (torch.Tag.pointwise in func.tags or name in TAKE_NUMBERS):
            continue
        if here and name in INDEXING and isinstance(args[0], Cuda) and any(tensor is index for index in args[1]):
            waited()  # an index is brought over
            continue
        raise RuntimeError(
            "Expected all tensors to be on the same device, "
            f"but found at least two devices, {device} and {tensor.device}! "
            f"({func} of {', '.join(f'{tuple(t.shape)} on {t.device}' for t in tensors)})"
        )


def _waits(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    if name in INDEXING:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    return name in WAIT


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention`, of which CUDA has kernels."""
    states, settings = (query, key, value), {"scale": scale, "enable_gqa": enable_gqa}
    if not any(isinstance(tensor, Cuda) for tensor in (*states, attn_mask)):
        return _sdpa(*states, attn_mask, dropout_p, is_causal, **settings)
    if torch.is_autocast_enabled("cuda"):
        states = tuple(state.to(torch.get_autocast_dtype("cuda")) for state in states)
    return attend(*states, attn_mask, dropout_p, is_causal, **settings)


def attend(query: Any, key: Any, value: Any, mask: Any, dropout: float, is_causal: bool, **settings: Any) -> Any:
    """The formula of attention, operator by operator. The simulation has another one."""
    if isinstance(mask, CausalBias):  # of the lower right
        lower = torch.ones(query.size(2), key.size(2), dtype=torch.bool).tril(key.size(2) - query.size(2))
        mask = Cuda(lower, query.device)
    if mask is not None and mask.dtype == torch.bool:  # the formula adds its mask
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    return torch.ops.aten._scaled_dot_product_attention_math(query, key, value, mask, dropout, is_causal, **settings)[0]

"""The pretended GPU without computing: a large tensor has a shape and a storage, but no memory (torch's meta tensors),
so that a training program runs at full size on a machine without a GPU and without memory.

A small tensor keeps its numbers (ids, masks, lengths, rewards), because programs branch on them. If a program asks
another tensor for a number, the number is made up.

Does not count memory: record.py does.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from gpu_like import stand_ins, tensors
from gpu_like.tensors import CPU
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from trl.kernels import chunked_logprob

aten = torch.ops.aten
META = torch.device("meta")
WHOLE, FLOATS = 1 << 22, 1 << 16  # elements up to which numbers are kept
TOKEN = 5  # the token that is "sampled"

INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
DRAWS = {aten.argmax.default, aten.max.dim, aten.multinomial.default}


def install() -> None:
    """Give the pretended GPU no memory, and let the program choose kernels as on a GPU, for the rest of the process."""
    tensors.compute, tensors.attend = compute, attend
    # Without a kernel for CUDA torch would take this one apart before the device hears of it.
    tensors.LIBRARY.impl("silu_backward", lambda *args: NotImplemented, "CUDA")
    head: Any = chunked_logprob
    head._use_triton = lambda device: device.type == "cuda"
    # A kernel is launched as ``kernel[grid](...)``, and allocates nothing.
    head._forward_kernel = head._backward_kernel = defaultdict(lambda: stand_ins.always(None))
    head.triton = SimpleNamespace(cdiv=lambda a, b: -(-a // b))


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Apply an operator to what the tensors of the device hold. Computes only if all numbers are there."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not given:
        made = func(*args, **{**kwargs, "device": META})
        return func(*args, **kwargs) if small(made) else made
    if not any(tensor.is_meta for tensor in given):
        return tree_map_only(Tensor, lambda out: out if small(out) else without_numbers(out), func(*args, **kwargs))
    if func is aten._local_scalar_dense.default:
        return torch.ones((), dtype=args[0].dtype).item()
    if func is aten.equal.default:
        return True
    if func is aten.where.self and args[0].is_meta and not args[1].is_meta and args[0].shape == args[1].shape:
        return args[1].clone()  # the condition is taken to hold
    if func is aten._to_copy.default and kwargs.get("device") == CPU and small(args[0]):
        return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
    if func in INDEXED:
        args = (args[0], [place for index in args[1] for place in _places(index)], *args[2:])
    args, kwargs = tree_map(without_numbers, (args, kwargs))
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": META, "pin_memory": False}
    out = func(*args, **kwargs)
    if func in DRAWS:
        drawn = out[1] if isinstance(out, tuple) else out
        token = torch.full(drawn.shape, TOKEN)
        return (out[0], token) if isinstance(out, tuple) else token
    return out


def without_numbers(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.is_meta:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)


def small(tensor: Tensor) -> bool:
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return elements <= (FLOATS if tensor.is_floating_point() else WHOLE)


def _places(index: Tensor | None) -> list[Any]:
    """A mask as the places where it is true: all of them if its numbers are not there."""
    if index is None or index.dtype != torch.bool:
        return [index]
    return list((torch.ones(index.shape, dtype=torch.bool) if index.is_meta else index).nonzero().unbind(1))


def attend(
    query: Any, key: Any, value: Any, mask: Any, dropout: float, is_causal: bool, *, scale: Any, enable_gqa: bool
) -> Any:
    """The kernel that CUDA would choose: flash without a mask, in 16 bit; the memory-efficient one otherwise."""
    if isinstance(mask, CausalBias):  # of the lower right, which no kernel spells out
        mask = None
    if mask is None and query.dtype != torch.float32 and query.size(-1) <= 256:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout, is_causal, scale=scale)[0]
    if enable_gqa and key.size(1) != query.size(1):
        key, value = (states.repeat_interleave(query.size(1) // key.size(1), 1) for states in (key, value))
    if mask is not None:
        if mask.dtype == torch.bool:
            seen, hidden = (torch.full((), value, dtype=query.dtype, device="cuda") for value in (0.0, -torch.inf))
            mask = torch.where(mask, seen, hidden)
        if mask.size(-1) % 16:  # the kernel loads 16 at a time
            columns = mask.size(-1)
            mask = torch.nn.functional.pad(mask, (0, -columns % 16))[..., :columns]
        mask = mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
    learns = any(states.requires_grad for states in (query, key, value))
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, learns, dropout, is_causal, scale=scale
    )[0]

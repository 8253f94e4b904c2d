"""The rest of torch believes in the pretended GPU (device.py): what is asked of ``torch.cuda``, the device guard, the
choice of an attention kernel, what fake tensors cannot do, and Triton's kernels.

`install` changes torch for the rest of the process, before transformers is imported: for a process of its own.

Does not make tensors.
"""

import importlib
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
from gpu_like import answers
from gpu_like.simulation.device import CUDA, known
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.bias import CausalBias

aten = torch.ops.aten
_LIBRARY = torch.library.Library("aten", "IMPL")


def install() -> None:
    """Make this process take the pretended GPU for a real one. Call it before transformers, peft or trl is imported."""
    for name in ("torch._dynamo", "bitsandbytes"):  # which would look for functions that only a GPU's torch has
        with suppress(ImportError):
            importlib.import_module(name)
    fake: Any = FakeTensor
    fake.tolist = lambda tensor: _numbers(tensor).tolist()
    fake.numpy = lambda tensor, *args, **kwargs: _numbers(tensor).numpy()
    fake.data_ptr = lambda tensor: id(tensor.untyped_storage())
    fake.__deepcopy__ = _deep_copied
    fake.record_stream = lambda tensor, stream: None
    inner: Any = fake_tensor
    inner.init_gpu_context = lambda *args: None
    torch.autograd.set_multithreading_enabled(False)
    answers.put_in(1 << 40)
    torch.nn.functional.scaled_dot_product_attention = _attention
    module: Any = torch.nn.Module
    module._apply = _apply
    # Without a kernel for CUDA torch would take this one apart before a mode hears of it.
    _LIBRARY.impl("silu_backward", lambda *args: NotImplemented, "CUDA")


def _numbers(tensor: Any) -> Tensor:
    numbers = known(tensor)
    return torch.ones(tensor.shape, dtype=tensor.dtype) if numbers is None else numbers


def _deep_copied(tensor: Any, memo: dict[int, Any]) -> Any:
    if id(tensor) not in memo:
        copy = tensor.detach().clone()
        memo[id(tensor)] = torch.nn.Parameter(copy) if isinstance(tensor, torch.nn.Parameter) else copy
        memo[id(tensor)].requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]


def _apply(module: Any, function: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """``torch.nn.Module._apply`` without what fake tensors cannot do: a parameter that changes is a new one."""
    for child in module.children() if recurse else ():
        child._apply(function)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            with torch.no_grad():
                applied = function(parameter)
            if applied is not parameter:
                module._parameters[name] = torch.nn.Parameter(applied, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


_plain_attention = torch.nn.functional.scaled_dot_product_attention


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel that CUDA would choose: flash without a mask, in 16 bit; the memory-efficient one otherwise."""
    if not isinstance(query, FakeTensor):
        return _plain_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if torch.is_autocast_enabled("cuda"):
        half = torch.get_autocast_dtype("cuda")
        query, key, value = (states.to(half) for states in (query, key, value))
    if isinstance(attn_mask, CausalBias):  # of the lower right, which no kernel spells out
        attn_mask = None
    if attn_mask is None and query.dtype != torch.float32 and query.size(-1) <= 256:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa and key.size(1) != query.size(1):
        key, value = (states.repeat_interleave(query.size(1) // key.size(1), 1) for states in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            seen, hidden = (torch.full((), value, dtype=query.dtype, device=CUDA) for value in (0.0, -float("inf")))
            attn_mask = torch.where(attn_mask, seen, hidden)
        if attn_mask.size(-1) % 16:  # the kernel loads 16 at a time
            columns = attn_mask.size(-1)
            attn_mask = torch.nn.functional.pad(attn_mask, (0, -columns % 16))[..., :columns]
        attn_mask = attn_mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
    learns = any(states.requires_grad for states in (query, key, value))
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, learns, dropout_p, is_causal, scale=scale
    )[0]


def pretend_triton() -> None:
    """TRL's fused LM head goes the way that it goes on a GPU."""
    import trl.trainer.utils
    from trl.kernels import chunked_logprob as head

    changed: Any = head
    # A kernel is launched as ``kernel[grid](...)``, and allocates nothing.
    nothing = defaultdict(lambda: answers.always(None))
    changed._use_triton = trl.trainer.utils._use_triton = lambda device: device.type == "cuda"
    changed._forward_kernel = changed._backward_kernel = nothing
    changed.triton = SimpleNamespace(cdiv=lambda a, b: -(-a // b))

"""Count the live bytes of fake tensors, and replace GPU kernels that a CPU does not have.

Does not depend on the model. `set_up` changes torch and the trainer: call it only in a separate process.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
import transformers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_math.trainer import attention, varlen

aten = torch.ops.aten


class Live(TorchDispatchMode):
    """Count the bytes of storages made in this context: ``now``, and ``trace`` after each allocation."""

    def __init__(self, stored: list[Tensor]) -> None:
        super().__init__()
        self.held: dict[int, Any] = {tensor.untyped_storage()._cdata: None for tensor in stored}
        self.now, self.trace = 0, [0]

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A fake tensor has no values: return a constant.
        if func is aten._local_scalar_dense.default:
            return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        if func is aten.equal.default:
            return False
        # The fake tensor cache would give the output a new storage, and its bytes would count twice.
        if func is aten._unsafe_view.default:
            func = aten.view.default
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, FakeTensor):
                self._made(tensor.untyped_storage())
        return out

    def _made(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.held and size:
            # A storage is freed with its last tensor. The key is an address, which a later storage may get.
            self.held[key] = weakref.ref(storage, lambda _: self._freed(key, size))
            self.now += size
            self.trace.append(self.now)

    def _freed(self, key: int, size: int) -> None:
        if self.held.pop(key, None) is not None:
            self.now -= size


class Flash(torch.autograd.Function):
    """The memory of a flash kernel (FlashAttention 2).

    The forward pass saves q, k, v, the output and a float32 per query and head. The backward pass allocates dq in
    float32, a float32 per query, and dk and dv for each query head if heads are grouped.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:2], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        q, k, v, _, sums = ctx.saved_tensors
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        # Nothing reads the workspace. The variable keeps it alive next to the gradients, as the kernel does.
        workspace = [q.new_empty(q.shape, dtype=torch.float32), torch.empty_like(sums)]
        if k.size(1) != q.size(1):
            workspace += [states.new_empty(states.size(0), q.size(1), states.size(2)) for states in (k, v)]
        return gradients


class Head(torch.autograd.Function):
    """The computation after the model's body. It saves nothing, and returns a gradient for the body's output."""

    @staticmethod
    def forward(ctx: Any, states: Tensor) -> Tensor:
        ctx.like = states.shape, states.dtype
        return states.new_empty(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.empty(ctx.like[0], dtype=ctx.like[1])


def kernel(q: Tensor, k: Tensor, v: Tensor, scores: varlen.AttentionParams) -> varlen.Kernel:
    """Return the kernel that `varlen.kernel` chooses on a GPU."""
    # The limits of torch's flash kernel: 16-bit tensors, heads of at most 256, and values as wide as queries.
    if scores.needs_eager or q.dtype == torch.float32 or q.size(-1) > 256 or q.size(-1) != v.size(-1):
        return varlen.one_by_one
    return flash


def flash(q: Tensor, k: Tensor, v: Tensor, spans: varlen.Spans, scores: varlen.AttentionParams) -> Tensor:
    return Flash.apply(q, k, v)


varlen.NAMES[flash] = "measured"


def dropout(states: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    # CUDA's kernel saves a mask of one byte per element. A CPU's saves the mask in the dtype.
    if training and p and isinstance(states, FakeTensor):
        return torch.native_dropout(states, p, True)[0]
    return plain_dropout(states, p, training, inplace)


plain_dropout, plain_kernel = torch.nn.functional.dropout, varlen.kernel


def set_up(gpu: bool) -> None:
    """Make torch and the trainer behave as on a GPU, or as on a CPU, in this process."""
    modules: Any = torch.nn.Module
    functional: Any = torch.nn.functional
    kernels: Any = varlen
    attentions: Any = attention
    # torch converts a module's tensors by swapping old and new ones, which it refuses for fake tensors. peft converts
    # each new adapter; layers.py gives the adapter its dtype.
    modules._apply = lambda module, function, recurse=True: module
    functional.dropout = dropout if gpu else plain_dropout
    kernels.kernel = kernel if gpu else plain_kernel
    # Fake tensors are on the CPU, where the trainer computes attention in float32.
    attentions.on_cpu = lambda query: not gpu
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")

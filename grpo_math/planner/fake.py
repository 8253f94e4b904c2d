"""Count the live bytes of fake tensors, and replace GPU kernels that a CPU does not have.

`set_up` changes torch and the trainer: call it only in a separate process.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_math.packing import attention, varlen

aten = torch.ops.aten


class AllocationRecorder(TorchDispatchMode):
    """Count the bytes of storages made in this context, except those of the model and its inputs.

    A segment is the time between two marks.

    ``segments``: for each segment, the live bytes at its start and after each allocation.
    """

    def __init__(self, model: torch.nn.Module, inputs: Iterable[Tensor]) -> None:
        super().__init__()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        stored = (*model.parameters(), *model.buffers(), *gradients, *inputs)
        self.known = {tensor.untyped_storage()._cdata for tensor in stored}
        self.now = 0
        self.segments = [[0]]

    def mark(self, *args: Any) -> None:
        self.segments.append([self.now])

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
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            # A storage is freed with its last tensor. The key is an address, which a later storage may get.
            weakref.finalize(storage, self._free, key, size)
            self.now += size
            self.segments[-1].append(self.now)

    def _free(self, key: int, size: int) -> None:
        self.known.remove(key)
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


def flash(q: Tensor, k: Tensor, v: Tensor, *offsets: Any, **options: Any) -> Tensor:
    return Flash.apply(q, k, v)


torch_dropout, torch_norm, cpu_takes = torch.nn.functional.dropout, torch.nn.functional.layer_norm, varlen.flash_takes


def takes(q: Tensor, k: Tensor, v: Tensor, dropped: float = 0.0) -> bool:
    """Return `varlen.flash_takes` of a GPU: 16-bit tensors, heads of at most 256, and values as wide as queries."""
    return q.dtype != torch.float32 and q.size(-1) <= 256 and q.size(-1) == v.size(-1)


def dropout(states: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    # CUDA's kernel saves a mask of one byte per element. A CPU's saves the mask in the dtype.
    return torch.native_dropout(states, p, True)[0] if training and p else states


def layer_norm(states: Tensor, *arguments: Any, **options: Any) -> Tensor:
    # A GPU's autocast computes a LayerNorm in float32, a CPU's does not. peft generates without autocast.
    wide = torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
    return torch_norm(states.float() if wide else states, *arguments, **options)


def set_up(gpu: bool) -> None:
    """Make torch and the trainer behave as on a GPU, or as on a CPU, in this process."""
    # torch converts a module's tensors by swapping old and new ones, which it refuses for fake tensors. peft converts
    # each new adapter; layers.py gives the adapter its dtype.
    torch.nn.Module._apply = lambda module, function, recurse=True: module  # type: ignore[method-assign]
    torch.nn.functional.dropout = dropout if gpu else torch_dropout  # type: ignore[assignment]
    torch.nn.functional.layer_norm = layer_norm if gpu else torch_norm  # type: ignore[assignment]
    varlen.flash_takes = takes if gpu else cpu_takes
    varlen.varlen_attn = flash  # type: ignore[assignment]
    # Fake tensors are on the CPU, where the trainer computes attention in float32.
    attention.on_cpu = lambda states: not gpu

"""A CUDA device that is none: tensors that say ``cuda:0`` and have a shape and a storage, but no memory (torch's fake
tensors), so that a training program runs at full size on a machine without a GPU and without memory.

Tensors on the CPU stay real. A small tensor on the pretended GPU that was made of known numbers (ids, masks, lengths,
rewards) carries them along, since programs branch on them; of any other tensor a number is made up where one is asked
for. pretend.py makes the rest of torch believe in that GPU.

Does not compute, and does not count memory: live.py does.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
KNOWN_WHOLE, KNOWN_FLOAT = 1 << 22, 1 << 16  # elements up to which numbers are carried along
TOKEN = 5  # the token that is "sampled"
VALUE = "_known"  # the attribute with the numbers of a fake tensor

# Operators whose output has a shape that only the numbers tell.
BY_NUMBERS = {
    *(aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.unique_dim.default),
    *(aten.unique_consecutive.default, aten.repeat_interleave.Tensor, aten.bincount.default),
}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
# Operators whose output shares its input's storage, which the cache of fake tensors overlooks.
SHARES = {aten._unsafe_view.default: aten.view.default}
DRAWS = {aten.argmax.default, aten.max.dim, aten.multinomial.default}
# What CUDA has as one kernel, and fake tensors would take apart, on the device that C++ is told.
DROPS = {aten.native_dropout.default, aten.native_dropout_backward.default}
After = Callable[[Any, tuple[Any, ...], Any], None]


class FakeCuda(TorchDispatchMode):
    """While open, what would run on ``cuda`` makes fake tensors. ``after(operator, arguments, output)`` hears of it."""

    def __init__(self, after: After) -> None:
        super().__init__()
        self.after = after
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, func = kwargs or {}, SHARES.get(func, func)
        device = kwargs.get("device")
        if device is not None:
            device = torch.device(device)
            # The guard of meta tensors makes ``torch.tensor(..., device="cuda")`` ask for a copy there.
            if device.type == "cuda" or (device.type == "meta" and func is aten._to_copy.default):
                device = CUDA
            kwargs = {**kwargs, "device": device}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        faked = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if not faked and device != CUDA:
            return func(*args, **kwargs)
        if func in (aten._to_copy.default, aten.copy_.default):
            out = self._copied(func, kinds, args, kwargs)
        else:
            out = self._made(func, kinds, args, kwargs, tensors)
        self.after(func, args, out)
        return out

    def _copied(self, func: Any, kinds: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is aten.copy_.default:
            target, source = args[:2]
            if not isinstance(target, FakeTensor):
                if (numbers := known(source)) is not None:
                    target.copy_(numbers)
                return target
            if (mine := known(target)) is not None:
                numbers = known(source)
                setattr(target, VALUE, None if numbers is None else mine.copy_(numbers))
            return target
        source, to = args[0], kwargs.get("device") or getattr(args[0], "fake_device", args[0].device)
        numbers = known(source)
        if numbers is not None:
            numbers = func(numbers, **{**kwargs, "device": CPU})
        if to.type == "cpu":
            if numbers is not None:
                return numbers
            if source.numel() <= KNOWN_FLOAT:
                return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
            return self.fakes.dispatch(func, kinds, args, kwargs)
        if isinstance(source, FakeTensor) and source.fake_device == CUDA:
            out = self.fakes.dispatch(func, kinds, args, kwargs)
        else:
            dtype, form = kwargs.get("dtype") or source.dtype, {"device": CUDA}
            similar = (source.shape, source.stride()), {"dtype": dtype, **form}
            out = self.fakes.dispatch(aten.empty_strided.default, (), *similar)
        return self._with(out, numbers)

    def _made(self, func: Any, kinds: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        numbers = [known(tensor) for tensor in tensors]
        all_known = all(value is not None for value in numbers)
        if func is aten._local_scalar_dense.default:
            if all_known:
                return func(numbers[0])
            return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        if func is aten.equal.default:
            return func(*numbers) if all_known else True
        if func in BY_NUMBERS:
            if not all_known:
                raise RuntimeError(f"{func} needs numbers that the simulation does not have")
            given: Any = tree_map(known_or_same, kwargs)
            return tree_map(self._moved, func(*tree_map(known_or_same, args), **given))
        if func in INDEXED:
            args = (args[0], [position for index in args[1] for position in self._places(index)], *args[2:])
        if func in DROPS:
            outs = [torch.empty_like(args[0], dtype=dtype, device=CUDA) for dtype in (args[0].dtype, torch.bool)]
            return tuple(outs) if func is aten.native_dropout.default else outs[0]
        out: Any = self.fakes.dispatch(func, kinds, args, kwargs)
        if func in DRAWS and not all_known:
            drawn = out[1] if isinstance(out, tuple) else out
            self._with(drawn, torch.full(drawn.shape, TOKEN))
            return out
        if func is aten.where.self and numbers[0] is None:  # what is not known is taken to hold
            return self._with(out, numbers[1])
        changes = func._schema.is_mutable
        if all_known and (changes or all(small(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor))):
            given = tree_map(known_or_same, kwargs)
            if given.get("device") is not None:
                given["device"] = CPU
            result = func(*tree_map(known_or_same, args), **given)
            if not changes:
                for fake, real in zip(tree_leaves(out), tree_leaves(result), strict=True):
                    if isinstance(fake, FakeTensor):
                        setattr(fake, VALUE, real)
        elif changes:
            for position, argument in enumerate(func._schema.arguments):
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for leaf in tree_leaves(value):
                        if isinstance(leaf, FakeTensor):
                            setattr(leaf, VALUE, None)
        return out

    def _places(self, index: Tensor | None) -> list[Any]:
        """A mask as the places where it is true; all of them where its numbers are not known."""
        if index is None or index.dtype != torch.bool:
            return [index]
        numbers = known(index)
        places = (torch.ones(index.shape, dtype=torch.bool) if numbers is None else numbers).nonzero()
        return [self._moved(column.contiguous()) for column in places.unbind(1)]

    def _moved(self, real: Any) -> Any:
        if not isinstance(real, Tensor):
            return real
        with self.fakes:
            fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=CUDA)
        return self._with(fake, real)

    def _with(self, fake: Any, numbers: Tensor | None) -> Any:
        if isinstance(fake, FakeTensor) and fake.fake_device == CUDA and numbers is not None and small(numbers):
            setattr(fake, VALUE, numbers)
        return fake


def known(tensor: Any) -> Tensor | None:
    """The numbers of a tensor, on the CPU, if they are known and few."""
    if isinstance(tensor, FakeTensor):
        return getattr(tensor, VALUE, None)
    return tensor if small(tensor) else None


def known_or_same(value: Any) -> Any:
    return known(value) if isinstance(value, FakeTensor) else value


def small(tensor: Tensor) -> bool:
    return tensor.numel() <= (KNOWN_FLOAT if tensor.is_floating_point() else KNOWN_WHOLE)

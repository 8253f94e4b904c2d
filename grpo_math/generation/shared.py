"""Share the base weights with a colocated vLLM engine (``vllm_share_weights``): one copy in memory instead of two.

An adapter's base never changes, so the engine and the trainer can use the same tensors. In the order of TRL's
constructor:

1. `SharedBase.create` makes the policy with parameters that take no memory. peft adds its adapter as always.
2. The engine loads the weights inside `SharedBase.locate`, which finds out where each parameter is in the engine.
3. `SharedBase.attach` makes each base parameter a view of the engine's tensor.

There is no table of model families. vLLM's own ``load_weights`` is called with meta tensors. A dispatch mode records
where each of them would be copied to. The reverse of transformers' weight conversion, which ``save_pretrained`` uses,
names the tensors of a checkpoint. A layout that is not a plain view is refused with the name of the parameter.

>>> engine = torch.arange(24.0).view(6, 4)             # query and key in one tensor
>>> parameter = torch.empty(2, 4, device="meta")       # the key, as transformers has it
>>> pieces = [(engine[4:5], parameter[:1]), (engine[5:], parameter[1:])]
>>> find_view("key", parameter, pieces).tolist()
[[16.0, 17.0, 18.0, 19.0], [20.0, 21.0, 22.0, 23.0]]

Does not share weights that vLLM repacks for its kernels, and weights that are split over GPUs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.core_model_loading import revert_weight_conversion

from grpo_math.errors import ConfigError
from grpo_math.generation import four_bit
from grpo_math.system.replaced import replaced

aten = torch.ops.aten
SAMPLED = 1000  # values of each tensor that are compared


def cannot_share(reason: str) -> ConfigError:
    return ConfigError("vllm_share_weights", True, f"does not work here: {reason}", "leave it out")


def storage_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def storage_addresses(model: nn.Module) -> set[int]:
    return {storage_address(tensor) for tensor in [*model.parameters(), *model.buffers()]}


class SharedBase:
    """The base of the policy while TRL's constructor runs. ``views`` has the engine's tensor for each name in the
    state of the policy, in the policy's shape."""

    def __init__(self) -> None:
        self.skeleton: Any = None  # the policy on the meta device
        self.modules: dict[str, nn.Module] = {}
        self.views: dict[str, Tensor] = {}
        self.constants: dict[str, Any] = {}  # those of bitsandbytes, for each weight in 4 bit

    def create(self, make: Callable[..., Any], path: str, **kwargs: Any) -> Any:
        """Return TRL's model of ``path``, made by ``make``, with parameters that take no memory."""
        if kwargs.get("revision") not in (None, "main"):
            raise cannot_share(f"vLLM loads the revision main, not {kwargs['revision']}")
        self.skeleton = skeleton = make(path, **{**kwargs, "device_map": "meta", "quantization_config": None})
        quantization = kwargs.get("quantization_config")
        if getattr(skeleton.config, "quantization_config", None):
            raise cannot_share("the checkpoint is quantised")
        if quantization is not None and not four_bit.supports(quantization):
            raise cannot_share("vLLM quantises to 4 bit of type nf4, with nested constants")
        state = {name: four_bit.one_element(t.shape, t.dtype) for name, t in skeleton.state_dict().items()}
        model = type(skeleton).from_pretrained(
            None, config=skeleton.config, state_dict=state, dtype=skeleton.dtype, device_map=None
        )
        if quantization is not None:
            four_bit.quantise(skeleton, quantization)
            four_bit.quantise(model, quantization)
        model.generation_config = skeleton.generation_config
        model.config._name_or_path = path
        model.name_or_path = path
        # transformers' Trainer does not move a model with a device map. Moving would give each parameter its full size.
        model.hf_device_map = {"": "cpu"}
        self.modules = dict(model.named_modules())
        return model

    @contextmanager
    def locate(self) -> Iterator[None]:
        """Find the tensors of the engine that loads its weights inside this context. Afterwards `views` is complete."""
        if self.skeleton is None:
            raise cannot_share("the trainer got a model instead of a name, and vLLM would load another copy")
        from vllm.model_executor.model_loader import base_loader

        prepare = base_loader.process_weights_after_loading

        # vLLM calls this function when the weights are loaded. Later, it may rename or wrap layers for LoRA.
        def prepare_and_compare(engine: nn.Module, *args: Any) -> None:
            self.views = find_views(self.skeleton, engine)
            self.constants = four_bit.find_constants(self.views, engine)
            before = {name: sample_values(view) for name, view in self.views.items()}
            prepare(engine, *args)
            addresses = storage_addresses(engine)
            for name, view in self.views.items():
                if storage_address(view) not in addresses or not torch.equal(sample_values(view), before[name]):
                    raise cannot_share(f"vLLM repacks {name} for its kernels")

        with replaced(base_loader, process_weights_after_loading=prepare_and_compare):
            yield

    def attach(self, model: nn.Module, device: torch.device) -> None:
        """Make each base parameter of ``model`` a view of the engine's tensor. Move the rest (adapter, buffers) to the
        device, and refuse to merge the adapter from now on."""
        new_parameters: dict[int, nn.Parameter] = {}
        for name, view in self.views.items():
            owner, _, leaf = name.rpartition(".")
            # The modules by their names before peft wrapped some of them.
            module = self.modules[owner]
            old = getattr(module, leaf)
            # A few small weights of the engine have more bits than the policy's.
            view = view.to(old.dtype)
            if name in self.constants:
                four_bit.set_weight(module, view, self.constants[name])
            elif isinstance(old, nn.Parameter):
                # Tied parameters stay one parameter.
                module._parameters[leaf] = new_parameters.setdefault(id(old), nn.Parameter(view, requires_grad=False))
            else:
                module._buffers[leaf] = view
        self.modules[""].__dict__.pop("hf_device_map")
        self.addresses = {storage_address(view) for view in self.views.values()}
        for tensor in [*model.parameters(), *model.buffers()]:
            if storage_address(tensor) not in self.addresses:
                tensor.data = tensor.data.to(device)
        # `merge_adapter`, `merge_and_unload` and TRL's sync of merged weights call the method of each layer.
        for module in model.modules():
            if isinstance(module, BaseTunerLayer):
                module.merge = module.unmerge = refuse_merge  # type: ignore[method-assign]
        self.check(model)

    def check(self, model: nn.Module) -> None:
        """Raise `ConfigError` if a base parameter is not the engine's: moving or casting a model copies its weights."""
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad and "lora_" not in name and storage_address(parameter) not in self.addresses:
                raise cannot_share(f"{name} was copied after the engine had loaded")


def refuse_merge(*args: Any, **kwargs: Any) -> None:
    raise cannot_share("vLLM uses the base too, and an adapter must not be merged into it")


def sample_values(tensor: Tensor) -> Tensor:
    """Return about `SAMPLED` values from everywhere in a tensor, on the CPU."""
    flat = torch.arange(0, tensor.numel(), max(1, tensor.numel() // SAMPLED), device=tensor.device)
    return tensor[torch.unravel_index(flat, tensor.shape)].cpu()


class RecordCopies(TorchDispatchMode):
    """Record where a meta tensor would be copied into a tensor of ``engine``, and change nothing of the engine."""

    def __init__(self, engine: nn.Module) -> None:
        super().__init__()
        self.copies: list[tuple[Tensor, Tensor]] = []  # (the engine's tensor, the part of a parameter)
        self.addresses = storage_addresses(engine)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # `contiguous` and `to` of a part stay in the storage of their parameter, so that its name is known.
        if func in (aten.clone.default, aten._to_copy.default) and args[0].is_meta:
            return aten.alias.default(args[0])
        if not func._schema.is_mutable or args[0].is_meta or storage_address(args[0]) not in self.addresses:
            return func(*args, **(kwargs or {}))
        if func is aten.copy_.default and args[1].is_meta:
            self.copies.append((args[0], args[1]))
        # The padding of a vocabulary is set to 0, and is 0 already.
        elif func not in (aten.fill_.Scalar, aten.zero_.default):
            raise cannot_share("vLLM changes a weight while it loads it")
        return args[0]


def find_views(skeleton: Any, engine: Any) -> dict[str, Tensor]:
    """Return {name: view of the engine's tensor} for each tensor in the state of ``skeleton``, a model on meta.

    The engine has loaded the weights. This calls its ``load_weights`` again, with tensors that have no values.
    """
    parameters = dict(skeleton.named_parameters(remove_duplicate=False))
    state = skeleton.state_dict()
    # Tied parameters have several names and are loaded once.
    first: dict[int, str] = {}
    source = {name: first.setdefault(id(parameters[name]), name) if name in parameters else name for name in state}
    # Each tensor has a separate storage, which identifies its parts.
    whole = {name: torch.empty_like(t, device="meta") for name, t in state.items() if source[name] == name}
    names = {tensor.untyped_storage()._cdata: name for name, tensor in whole.items()}
    record = RecordCopies(engine)
    try:
        with torch.no_grad(), record:
            engine.load_weights(list(revert_weight_conversion(skeleton, dict(whole)).items()))
    except ConfigError:
        raise
    # vLLM's loaders raise any exception for weights that they do not expect.
    except Exception as error:
        raise cannot_share(f"vLLM cannot load its weights twice ({type(error).__name__}: {error})") from error
    parts: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in whole}
    for target, part in record.copies:
        name = names.get(part.untyped_storage()._cdata)
        if name is None:
            raise cannot_share(f"vLLM computes a weight of shape {list(part.shape)} instead of copying it")
        parts[name].append((target, part))
    views = {name: find_view(name, tensor, parts[name]) for name, tensor in whole.items()}
    return {name: views[source[name]] for name in state}


def find_view(name: str, whole: Tensor, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the view of the engine's memory that has the shape of ``whole``.

    ``parts``: pairs of a tensor of the engine and the part of ``whole`` that is copied into it.
    """
    if sum(part.numel() for _, part in parts) != whole.numel():
        raise cannot_share(f"vLLM does not load all of {name}")
    target, part = parts[0]
    if torch.promote_types(target.dtype, whole.dtype) != target.dtype:
        raise cannot_share(f"vLLM has {name} in {target.dtype}, and the trainer in {whole.dtype}")
    if len(parts) == 1 and target.shape == part.shape == whole.shape and part.stride() == whole.stride():
        # In one piece: any strides will do, as of a transposed weight.
        return target.detach()
    # In several pieces, each element must be as far from the first one as it is in the parameter.
    shift = offset(target, part)
    same_storage = all(storage_address(t) == storage_address(target) for t, _ in parts)
    if shift is None or not same_storage or any(offset(t, p) != shift for t, p in parts):
        raise cannot_share(f"vLLM does not have {name} in one piece")
    return target.detach().as_strided(whole.shape, whole.stride(), shift)


def offset(target: Tensor, part: Tensor) -> Any:
    """Return how far an element of ``target`` is from the same element of ``part`` in their storages; None if that
    differs among elements."""
    steps = zip(target.shape, target.stride(), part.stride(), strict=True)
    if target.shape != part.shape or any(ours != theirs for size, ours, theirs in steps if size > 1):
        return None
    return target.storage_offset() - part.storage_offset()

"""TrainingState: model, optimizers, stateful objects and RNG states as nested state dicts.

State of stateful objects is split into tensors, which are sharded and saved like weights, and a
structure with placeholders, which keeps keys and container types exactly as they were.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from spotfit.checkpoint.base_checkpointer import load_object_state
from spotfit.checkpoint.format import StateKey
from spotfit.core.errors import ConfigError
from spotfit.frameworks.host_rng import host_rng_state, set_host_rng_state
from spotfit.torch.checkpoint.optimizer_state import load_optimizer_state_dict, optimizer_state_dict

StateDict = dict[str, Any]
SCALER = "scaler"
"""Name of the gradient scaler. A disabled GradScaler saves {}, which an enabled one rejects."""
_COLLECTIVE_NAMESPACES = ("c10d", "c10d_functional", "_c10d_functional")
# Objects up to this size may differ between ranks and are written by one rank; the imbalance that
# this causes between ranks is negligible.
_SMALL_BYTES = 2**20


class TrainingState(NamedTuple):
    """The objects whose state is saved and restored together."""

    model: Module
    optimizers: Sequence[Optimizer] = ()
    stateful_objects: Mapping[str, Any] = {}
    """Scheduler, scaler and the user's objects, by name; each has the state_dict methods."""

    def state_dict(self) -> StateDict:
        """Return the nested state; its tensors are those in use, with their sharding, not copies.

        Keys are "model", "optimizer" (if there are any optimizers) and "stateful_objects". Weights
        and optimizer state are keyed by the weights' names, which do not depend on the world size.
        With FSDP1 a collective. Raises `ConfigError` for sparse or expanded tensors of the model,
        and for optimizers of parameters that are not in the model.
        """
        state: StateDict = {"model": self.weights()}
        _reject_sparse_or_expanded(state["model"])
        if self.optimizers:
            state["optimizer"] = optimizer_state_dict(self.optimizers, self.model)
        state["stateful_objects"] = {
            name: extract_tensors(stateful.state_dict())
            for name, stateful in self.stateful_objects.items()
        }
        return state

    def weights(self) -> StateDict:
        """Return the part of `state_dict()` that is saved as the model, by name."""
        if not any(True for _ in chain(self.model.parameters(), self.model.buffers())):
            return self.model.state_dict()  # get_model_state_dict raises for an empty one
        return get_model_state_dict(self.model)

    def unsynchronized_names(self, state: StateDict) -> frozenset[str]:
        """Return the names of state that may differ between ranks: "model.bn.running_mean".

        `state` is the result of `state_dict()`. These are the model's buffers, such as running
        means, which DDP synchronizes only at the beginning of a step, and small stateful objects
        (up to 1 MiB of tensors). Large objects are assumed to be equal on all ranks, which write
        them together.
        """
        # State dicts have names but not kinds: buffers are recognized by their address, which is 0
        # for empty tensors and those on the "meta" device.
        addresses = {buffer.data_ptr() for buffer in self.model.buffers()} - {0}
        names = {
            f"model.{name}"
            for name, value in state["model"].items()
            if isinstance(value, torch.Tensor)
            and not isinstance(value, DTensor)
            and value.data_ptr() in addresses
        }
        for name, parts in state["stateful_objects"].items():
            if sum(tensor.nbytes for tensor in parts["tensors"].values()) <= _SMALL_BYTES:
                prefix = f"stateful_objects.{name}"
                names.update(f"{prefix}.{part}" for part in parts if part != "tensors")
                names.update(f"{prefix}.tensors.{tensor}" for tensor in parts["tensors"])
        return frozenset(names)

    def wait_for_gpus(self) -> None:
        """Block until the model's GPUs have finished all kernels and copies of all streams.

        A restore writes tensors from several threads, and each thread has its own current stream:
        neither its copies nor the kernels queued before them wait for the other streams.
        """
        for device in {weight.device for weight in self.model.parameters() if weight.is_cuda}:
            torch.cuda.synchronize(device)

    def load_state_dict(self, state: StateDict) -> list[str]:
        """Load `state`, which has the form of `state_dict()` and may lack stateful objects.

        Called on every rank at the end of a restore, once all tensors were read. Returns the names
        of objects that keep their initial state because theirs was empty: "scaler" or none. Raises
        `ConfigError` if an object rejects its state; the objects before it are then changed.
        """
        if state["model"]:
            set_model_state_dict(self.model, state["model"])
        if "optimizer" in state:  # absent if no optimizer was saved
            load_optimizer_state_dict(state["optimizer"], self.optimizers, self.model)
        not_restored = []
        for name, parts in state["stateful_objects"].items():
            saved, stateful = insert_tensors(**parts), self.stateful_objects[name]
            if name == SCALER and not saved and stateful.state_dict():
                not_restored.append(name)
            else:
                load_object_state(saved, name, stateful)
        return not_restored


def copy_containers(state: StateDict) -> StateDict:
    """Replace the nested containers of model and optimizer state by new dicts and lists.

    Changes `state`, from `TrainingState.state_dict()`, and returns it; tensors and other values are
    the same objects. A restore may then set entries without changing the objects' own containers.
    """
    for values in (state["model"], state.get("optimizer", {})):
        for name, value in values.items():
            # The model's own dict is kept: it has torch's attribute with the modules' versions.
            values[name] = tree_map(lambda leaf: leaf, value)
    return state


def _reject_sparse_or_expanded(weights: Mapping[str, Any]) -> None:
    tensors = {name: one for name, one in weights.items() if isinstance(one, torch.Tensor)}
    sparse = [name for name, one in tensors.items() if one.layout is not torch.strided]
    if sparse:
        raise ConfigError(
            f"Sparse tensors of the model cannot be saved: {', '.join(sparse)}.",
            do="Register them with persistent=False and create them again after a restart, or "
            "store them in an object that is passed in extra={…}.",
        )
    # A restore writes every element, but those of an expanded tensor share memory.
    if expanded := [name for name, one in tensors.items() if is_expanded(one)]:
        raise ConfigError(
            f"Expanded tensors of the model (stride 0) cannot be restored in place: "
            f"{', '.join(expanded)}.",
            do="Register them with .clone(), which allocates memory for every element.",
        )


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether several elements share memory (stride 0), as `Tensor.expand` creates them.

    Expanded tensors cannot be restored in place. False for sparse tensors. Of a DTensor this rank's
    shard is examined.
    """
    if tensor.layout is not torch.strided or 0 not in tensor.stride():
        return False
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return any(
        size > 1 and stride == 0 for size, stride in zip(local.shape, local.stride(), strict=True)
    )


def backup_tensors(state: StateDict) -> Callable[[], None]:
    """Copy all tensors of `state` to main memory; return a function that restores them.

    Of DTensors this rank's shards. Calling the function writes the copies back into the same
    tensors, in place; it may be called again. The copies exist as long as the function.
    """
    # Main memory, because a second copy of the state may not fit on the GPU.
    backups: list[tuple[torch.Tensor, torch.Tensor]] = []

    def back_up(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            local = (value.to_local() if isinstance(value, DTensor) else value).detach()
            backups.append((local, local.to("cpu", copy=True)))
        return value

    tree_map(back_up, state)

    def restore() -> None:
        for tensor, backup in backups:
            tensor.copy_(backup)

    return restore


def set_by_key(state: Any, key: StateKey, value: Any) -> None:
    """Set a nested value, creating containers: dicts for names and lists for integers.

    `state` is a dict or list and changed in place: `set_by_key({}, ("a", 1), 5)` makes {"a": [None,
    5]}. Lists are filled with None.
    """
    for part, following in zip(key, (*key[1:], None), strict=True):
        new = value if following is None else [] if isinstance(following, int) else {}
        if isinstance(part, int):
            state.extend([None] * (part + 1 - len(state)))
            if state[part] is None or following is None:
                state[part] = new
        elif part not in state or following is None:
            state[part] = new
        state = state[part]


class OpaqueValue:
    """Wraps a nested value so that torch's planners treat it as one value, not as containers."""

    def __init__(self, value: Any) -> None:
        self.value = value


def extract_tensors(value: Any) -> StateDict:
    """Split a nested value into `tensors` by path and a `structure` with placeholders for them.

    Returns a dictionary for `insert_tensors(**parts)`. Paths are like "/state/0/exp_avg".
    `placements` has the placement of each tensor that is not a plain CPU tensor, if there are any.
    Nothing is copied; sparse tensors stay in the structure.
    """
    tensors: dict[str, torch.Tensor] = {}
    structure = OpaqueValue(_extract_tensors(value, "", tensors))
    placements = {
        name: placement
        for name, tensor in tensors.items()
        if (placement := placement_of(tensor)) != CPU_PLACEMENT
    }
    return {"structure": structure, "tensors": tensors} | (
        {"placements": OpaqueValue(placements)} if placements else {}
    )


def insert_tensors(
    structure: Any, tensors: Mapping[str, torch.Tensor], placements: Any = None
) -> Any:
    """Return the nested value from the parts that `extract_tensors` returned.

    The `tensors` may be others than before, such as restored ones. `placements` is accepted for
    `**parts` and not needed.
    """
    return _insert_tensors(
        structure.value if isinstance(structure, OpaqueValue) else structure, tensors
    )


_TENSOR_PLACEHOLDER = "spotfit: tensor"
CPU_PLACEMENT = ("cpu", False)
"""The most common placement: device type, and whether the tensor is sharded."""


def placement_of(tensor: torch.Tensor) -> tuple[str, bool]:
    """Return the tensor's device type, such as "cuda", and whether it is sharded (a DTensor)."""
    return (tensor.device.type, isinstance(tensor, DTensor))


def _extract_tensors(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    # Sparse tensors stay in the structure, which is encoded as a whole.
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        while name in tensors:  # the keys 1 and "1" of a dict have the same path
            name += "'"
        tensors[name] = value
        return (_TENSOR_PLACEHOLDER, name)
    if isinstance(value, Mapping):
        parts = {
            key: _extract_tensors(part, f"{name}/{key}", tensors) for key, part in value.items()
        }
        # Mappings without tensors stay as they are, also those of types that we could not create.
        if all(part is value[key] for key, part in parts.items()):
            return value
        return OrderedDict(parts) if type(value) is OrderedDict else parts
    if type(value) in (list, tuple):
        items = [_extract_tensors(part, f"{name}/{n}", tensors) for n, part in enumerate(value)]
        is_unchanged = all(new is old for new, old in zip(items, value, strict=True))
        return value if is_unchanged else type(value)(items)
    return value


def _insert_tensors(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if (
        type(value) is tuple
        and len(value) == 2
        and value[0] == _TENSOR_PLACEHOLDER
        and value[1] in tensors
    ):
        return tensors[value[1]]
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _insert_tensors(part, tensors)) for key, part in value.items())
    if type(value) in (list, tuple):
        return type(value)(_insert_tensors(part, tensors) for part in value)
    return value


def gpu_in_use() -> bool:
    """Return whether this process has initialized CUDA; asking does not initialize it."""
    # Not is_available(), which calls cuInit: children that are forked later could not use the GPU.
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def keep_current_gpu() -> AbstractContextManager[object]:
    """Return a context in which another thread has the current GPU of this thread.

    Every thread begins with GPU 0. Its first call of the CUDA runtime would create a context there,
    which takes some hundred megabytes of a GPU that belongs to another worker.
    """
    return torch.cuda.device(torch.cuda.current_device()) if gpu_in_use() else nullcontext()


class RejectCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch lacks types
    """A context in which a collective of torch.distributed raises `ConfigError`.

    For a state dict that one rank reads while the others do not: the collective would block, or
    meet another one that they are in. FSDP1 and user-defined `state_dict` methods have some.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every operator in the context."""
        # A DTensor first becomes operators on its local tensor and collectives.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace in _COLLECTIVE_NAMESPACES:
            raise ConfigError(
                f"the state can only be read by all ranks together ({func})",
                do="Call Checkpointer.save() on all ranks after the last step.",
            )
        return func(*args, **(kwargs or {}))


# --- RNG state -----------------------------------------------------------------------------------


def rng_state() -> StateDict:
    """Return the RNG states of Python, torch, the GPUs, and of numpy if it is imported.

    Of this process, as copies. Those of GPUs only if CUDA is initialized: "cuda" is that of the
    current one, "other_cuda" those of the following visible ones, in the order of their numbers.
    """
    state = {**host_rng_state(), "torch": torch.get_rng_state()}
    if gpu_in_use():
        state["cuda"] = torch.cuda.get_rng_state()
        # A worker may have several GPUs, its first one is current. Each state has 16 bytes, and
        # reading it creates no context on its GPU.
        following = range(torch.cuda.current_device() + 1, torch.cuda.device_count())
        if others := [torch.cuda.get_rng_state(number) for number in following]:
            state["other_cuda"] = others
    return state


def set_rng_state(state: StateDict) -> None:
    """Set the RNG states of this process to `state`, which `rng_state` returned in any process.

    Those of GPUs only if `state` has them and this process has the GPUs, counted from its current
    one; that of numpy only if `state` has one.
    """
    set_host_rng_state(state)
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
        others = state.get("other_cuda", ())
        following = range(torch.cuda.current_device() + 1, torch.cuda.device_count())
        for number, other in zip(following, others, strict=False):
            torch.cuda.set_rng_state(other, number)

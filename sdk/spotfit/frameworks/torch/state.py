"""The state of a training: model, optimizers and whatever else goes on from where it was."""

from __future__ import annotations

import random  # noqa: TID251 - it is the user's dice that are kept here
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from spotfit.checkpoint.snapshot import Key
from spotfit.core.errors import ConfigError
from spotfit.frameworks.torch.optimizers import go_on_from, kept_by

State = dict[str, Any]
SCALER = "scaler"
"""What torch's kind of it keeps while it is disabled is nothing, and it does not take that back."""
_SMALL_BYTES = 2**20
"""Rank 0 may write so much more than the others."""


class Training(NamedTuple):
    """What is saved and restored together."""

    model: Module
    optimizers: Sequence[Optimizer] = ()
    others: Mapping[str, Any] = {}
    """By name, what has `state_dict` and `load_state_dict`: scheduler, scaler, and the user's."""

    def state(self) -> State:
        """All of it, nested; tensors are the ones in use, sharded as they are.

        Weights and what optimizers know of them go by the weights' names, at any world size.
        Raises `ConfigError` for what has no rows of numbers, or not each its own.
        """
        found: State = {"model": get_model_state_dict(self.model)}
        _refuse_sparse(found["model"])
        _refuse_expanded(found["model"])
        if self.optimizers:
            found["optimizer"] = kept_by(self.optimizers, self.model)
        found["others"] = {name: split(one.state_dict()) for name, one in self.others.items()}
        return found

    def drifting(self, state: State) -> frozenset[str]:
        """What each rank may have its own of: the model's buffers, such as running means, and
        small objects beside the model.

        DDP has every rank begin a step with rank 0's buffers, and then go its own way. An object
        that is big is taken to be alike on all ranks, for they save it together.
        """
        places = {buffer.data_ptr() for buffer in self.model.buffers()} - {0}
        buffers = {
            f"model.{name}"
            for name, value in state["model"].items()
            if isinstance(value, torch.Tensor)
            and not isinstance(value, DTensor)
            and value.data_ptr() in places
        }
        others = (_names_in(name, one) for name, one in state["others"].items() if _is_small(one))
        return frozenset(buffers.union(*others))

    def adopt(self, state: State) -> list[str]:
        """Go on from `state`, which has the form of `state()`, but for others it does not know.

        Returns the names of those that begin anew, for they had kept nothing. Raises `ConfigError`
        where one of the others does not take what it had kept.
        """
        set_model_state_dict(self.model, state["model"])
        if "optimizer" in state:  # else nothing was kept of one
            go_on_from(state["optimizer"], self.optimizers, self.model)
        blank = []
        for name, one in state["others"].items():
            kept, other = joined(**one), self.others[name]
            if name == SCALER and not kept and other.state_dict():
                blank.append(name)
            else:
                give_back(kept, name, other)
        return blank


def give_back(kept: Any, name: str, one: Any) -> None:
    """Have that object go on from what it kept. Raises `ConfigError` where it does not."""
    try:
        one.load_state_dict(kept)
    except Exception as unfit:  # the user's own code may raise anything
        raise ConfigError(
            f"{name} ({type(one).__name__}) did not take back what it had kept: "
            f"{type(unfit).__name__}: {unfit}",
            do="Have its load_state_dict take what its state_dict gave, at any number of workers. "
            "DDP puts 'module.' before the names of weights: keep those of the bare model.",
            may_pass=True,
        ) from unfit


def renewed(state: State) -> State:
    """The same tensors and values, in dictionaries and lists that no optimizer or module holds."""
    for values in (state["model"], state.get("optimizer", {})):
        for name, value in values.items():  # the first knows the versions of modules, too
            values[name] = tree_map(lambda one: one, value)
    return state


def _refuse_sparse(weights: Mapping[str, Any]) -> None:
    sparse = [
        name
        for name, one in weights.items()
        if isinstance(one, torch.Tensor) and one.layout is not torch.strided
    ]
    if sparse:
        raise ConfigError(
            f"{', '.join(sparse)} of the model is sparse, and only dense tensors are kept.",
            do="Register it with persistent=False and make it anew, or keep it in an object that "
            "is named in extra={…}.",
        )


def _refuse_expanded(weights: Mapping[str, Any]) -> None:
    expanded = [
        name for name, one in weights.items() if isinstance(one, torch.Tensor) and is_expanded(one)
    ]
    if expanded:
        raise ConfigError(
            f"{', '.join(expanded)} of the model is expanded: several of its numbers are one in "
            "memory, so no restore could bring each back.",
            do="Register it with .clone(), which gives each number a place of its own.",
        )


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several of its numbers are one in memory, as `expand` makes them."""
    if tensor.layout is not torch.strided or 0 not in tensor.stride():
        return False
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return any(
        size > 1 and stride == 0 for size, stride in zip(local.shape, local.stride(), strict=True)
    )


def kept(state: State) -> Callable[[], None]:
    """Puts the tensors of `state` back as they are now. Copies them to this machine's memory."""
    tensors: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            local = (value.to_local() if isinstance(value, DTensor) else value).detach()
            tensors.append((local, local.to("cpu", copy=True)))
        return value

    tree_map(keep, state)

    def put_back() -> None:
        for tensor, before in tensors:
            tensor.copy_(before)

    return put_back


def _is_small(other: State) -> bool:
    tensors: dict[str, torch.Tensor] = other["tensors"]
    return sum(tensor.nbytes for tensor in tensors.values()) <= _SMALL_BYTES


def _names_in(name: str, other: State) -> set[str]:
    """What that object's tensors, and all else of it, are called in a saved state."""
    values = {f"others.{name}.{part}" for part in other if part != "tensors"}
    return values | {f"others.{name}.tensors.{one}" for one in other["tensors"]}


def put(state: Any, key: Key, value: Any) -> None:
    """Where the key says: names lead into dictionaries, numbers into lists."""
    for part, following in zip(key, (*key[1:], None), strict=True):
        new = value if following is None else [] if isinstance(following, int) else {}
        if isinstance(part, int):
            state.extend([None] * (part + 1 - len(state)))
            if state[part] is None or following is None:
                state[part] = new
        elif part not in state or following is None:
            state[part] = new
        state = state[part]


class Whole:
    """A value that is kept as it is, whatever it is made of."""

    def __init__(self, value: Any) -> None:
        self.value = value


def split(value: Any) -> State:
    """The same with its tensors apart: what remains is kept to the letter, keys and kinds.

    `homes` says where tensors are that are not simply in this machine's memory.
    """
    tensors: dict[str, torch.Tensor] = {}
    whole = Whole(_without(value, "", tensors))
    homes = {name: home for name, one in tensors.items() if (home := home_of(one)) != CPU}
    return {"whole": whole, "tensors": tensors} | ({"homes": Whole(homes)} if homes else {})


def joined(whole: Any, tensors: Mapping[str, torch.Tensor], homes: Any = None) -> Any:
    """What was split; tensors are at home wherever they are."""
    return _with(whole.value if isinstance(whole, Whole) else whole, tensors)


_TENSOR = "spotfit: tensor"
CPU = ("cpu", False)
"""The home of most tensors: the kind of device, and whether ranks hold parts of it."""


def home_of(tensor: torch.Tensor) -> tuple[str, bool]:
    return (tensor.device.type, isinstance(tensor, DTensor))


def _without(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        while name in tensors:  # {1: …, "1": …}
            name += "'"
        tensors[name] = value
        return (_TENSOR, name)
    if isinstance(value, Mapping):
        parts = {key: _without(part, f"{name}/{key}", tensors) for key, part in value.items()}
        if all(part is value[key] for key, part in parts.items()):
            return value
        return OrderedDict(parts) if type(value) is OrderedDict else parts
    if type(value) in (list, tuple):
        items = [_without(part, f"{name}/{n}", tensors) for n, part in enumerate(value)]
        same = all(new is old for new, old in zip(items, value, strict=True))
        return value if same else type(value)(items)
    return value


def _with(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if type(value) is tuple and len(value) == 2 and value[0] == _TENSOR and value[1] in tensors:
        return tensors[value[1]]
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _with(part, tensors)) for key, part in value.items())
    if type(value) in (list, tuple):
        return type(value)(_with(part, tensors) for part in value)
    return value


def gpu_in_use() -> bool:
    """Whether this process has touched a GPU."""
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


# --- dice ----------------------------------------------------------------------------------------


def dice() -> State:
    """How all dice of this process stand: Python's, numpy's if it is used, torch's, the GPU's."""
    found: State = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy.random")) is not None:
        kind, keys, place, has_gauss, gauss = numpy.get_state()
        found["numpy"] = (kind, keys.tolist(), place, has_gauss, gauss)
    if gpu_in_use():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def put_back(found: State) -> None:
    """Have the dice fall as they would have."""
    random.setstate(found["python"])
    torch.set_rng_state(found["torch"])
    if "numpy" in found:
        import numpy

        numpy.random.set_state(found["numpy"])
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(found["cuda"])

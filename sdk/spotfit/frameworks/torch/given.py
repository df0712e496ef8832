"""What a Checkpointer is given: all that is wrong with it is told at once, before anything is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

from torch.nn import Module
from torch.nn.parameter import is_lazy

from spotfit.core.errors import ConfigError
from spotfit.frameworks.torch.optimizers import is_flattened, names_in

_STATE = ("state_dict", "load_state_dict")
_OPTIMIZER = ("param_groups", "state", *_STATE)
TAKEN = ("model", "optimizer", "scheduler", "scaler")
"""Names of parts that are always kept."""


class Given(NamedTuple):
    """As the user gave it, whatever that is."""

    model: Any
    optimizer: Any = None
    scheduler: Any = None
    scaler: Any = None
    loader: Any = None
    extra: Any = None
    own: Any = None

    @property
    def optimizers(self) -> tuple[Any, ...]:
        many = isinstance(self.optimizer, list | tuple)
        return tuple(
            one for one in (self.optimizer if many else [self.optimizer]) if one is not None
        )

    def check(self) -> None:
        """Raises `ConfigError` with all that is wrong."""
        wrong = [*self._wrong()] or [*self._wrong_weights()]
        if wrong:
            raise ConfigError(
                "\n".join(wrong),
                do="A model is a torch.nn.Module, an optimizer one of torch's or a list of them; "
                "all else has state_dict and load_state_dict.",
            )

    def _wrong(self) -> Iterator[str]:
        if not isinstance(self.model, Module):
            yield f"model is {_kind(self.model)}, and no torch.nn.Module."
        yield from _blank("model", self.model)
        for one in self.optimizers:
            if missing := _missing(one, _OPTIMIZER):
                yield f"optimizer is {_kind(one)}, which has no {missing}."
        for name in ("scheduler", "scaler"):
            one = getattr(self, name)
            if one is not None and (missing := _missing(one, _STATE)):
                yield f"{name} is {_kind(one)}, which has no {missing}."
        if self.loader is not None and not _is_loader(self.loader):
            yield f"loader is {_kind(self.loader)}, and no DataLoader."
        for name in ("extra", "own"):
            yield from _wrong_parts(name, getattr(self, name))

    def _wrong_weights(self) -> Iterator[str]:
        """Each is the model's, and one optimizer's: what is kept of it goes by its name."""
        if is_flattened(self.model):
            return  # only torch finds them
        names = names_in(self.model)
        learned: Counter[str] = Counter()
        for optimizer in self.optimizers:
            weights = {weight for group in optimizer.param_groups for weight in group["params"]}
            strange = [weight for weight in weights if weight not in names]
            if strange:
                yield (
                    f"{_kind(optimizer)} learns {len(strange)} parameters that the model has not, "
                    f"one of shape {tuple(strange[0].shape)}: make one model of all, such as a "
                    "torch.nn.ModuleDict, and optimizers once it is prepared."
                )
            learned.update(names[weight] for weight in weights if weight in names)
        twice = [name for name, optimizers in learned.items() if optimizers > 1]
        if twice:
            yield f"More than one optimizer learns {', '.join(sorted(twice)[:3])}."


def _wrong_parts(what: str, given: Any) -> Iterator[str]:
    if given is None:
        return
    if not isinstance(given, Mapping):
        yield f"{what} is {_kind(given)}, and no dictionary of objects by name."
        return
    if taken := sorted(set(given) & set(TAKEN)):
        yield f"{what} may not use the names {', '.join(taken)}: call them something else."
    for name, one in given.items():
        if not isinstance(name, str):
            yield f"{what} has the name {name!r}, which is no text."
        if missing := _missing(one, _STATE):
            yield f"{what}[{name!r}] is {_kind(one)}, which has no {missing}."
        yield from _blank(f"{what}[{name!r}]", one)


def _blank(what: str, one: Any) -> Iterator[str]:
    """What lazy modules have is nothing until they have seen a batch."""
    tensors = chain(one.named_parameters(), one.named_buffers()) if isinstance(one, Module) else ()
    blank = [name for name, tensor in tensors if is_lazy(tensor)]
    if blank:
        yield (
            f"{what} has {len(blank)} weights without a shape yet, {blank[0]} for one: have its "
            "lazy modules see a batch before."
        )


def _is_loader(loader: Any) -> bool:
    """Of others' own the log says that their place is not known."""
    return hasattr(loader, "__iter__") and not isinstance(loader, list | tuple | dict | str)


def _missing(one: Any, names: Iterable[str]) -> str:
    return " and no ".join(name for name in names if not hasattr(one, name))


def _kind(one: Any) -> str:
    if one is None:
        return "None"
    name = type(one).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"

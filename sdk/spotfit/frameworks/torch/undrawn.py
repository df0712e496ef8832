"""Weights that nobody draws at random, since a restore brings them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.nn import Parameter, init
from torch.overrides import TorchFunctionMode

from spotfit.core.errors import ConfigError, IntegrityError, SessionMisuseError
from spotfit.frameworks.torch.fitting import some

_WITHIN = frozenset({torch.Tensor.normal_, torch.Tensor.uniform_})
"""What torch.nn.init draws with; it says whose dice, though it be nobody's."""
_DRAWS = _WITHIN | {init.kaiming_uniform_, init.normal_, init.uniform_}
"""The latter three can be seen as a whole; all other ways to draw a weight come to the former."""
_HAVE_DICE = ("cpu", "cuda")
_within: ContextVar[bool] = ContextVar("undrawn", default=False)
_waiting: WeakKeyDictionary[object, list[ref[Parameter]]] = WeakKeyDictionary()
"""By training, the weights that nobody has drawn, until they are restored."""


@contextmanager
def built(training: object, *, left_out: bool) -> Iterator[None]:
    """Weights that are made meanwhile are NaN instead of drawn, if they are to be `left_out`.

    Else they are drawn with dice of their own, which are seeded by torch's: whatever else is drawn,
    meanwhile or afterwards, is the same either way.
    """
    seed = int(torch.randint(2**63 - 1, ()).item())
    weights: list[ref[Parameter]] = []
    if left_out:
        _waiting[training] = weights
    token = _within.set(left_out)
    try:
        with _Apart(seed, weights if left_out else None):
            yield
    finally:
        _within.reset(token)


def leaves_out() -> bool:
    """Whether weights that are made now are left out."""
    return _within.get()


def brought(training: object, others: Mapping[str, Any]) -> None:
    """A restore has brought all that was saved of that training.

    Raises `ConfigError` where a weight is still NaN, or one of the `others` has a copy that is.
    """
    weights = [weight for one in _waiting.pop(training, ()) if (weight := one()) is not None]
    shapes = {weight.shape for weight in weights if weight.dim() > 1}
    copied = (name for name, one in others.items() if shapes and _copies(one.state_dict(), shapes))
    blank = [f"a weight of shape {tuple(one.shape)}" for one in weights if _is_blank(one)]
    blank += map(repr, copied)
    if blank:
        raise ConfigError(
            "What init_module() has left to the checkpoint is in no checkpoint, or was NaN when it "
            f"was saved: {some(blank)}.",
            do="Make in init_module() what the Checkpointer is given, and nothing else; and copy "
            "weights, for an average of them for instance, after restore().",
        )


def refuse_to_begin(training: object) -> None:
    """Raises `IntegrityError` where there is nothing to restore after all."""
    if training in _waiting:
        raise IntegrityError(
            "The checkpoint that was there when the model was built cannot be found any more, and "
            "its weights were not drawn, for it was to bring them.",
            do="Restore it from a copy, or name a new run.",
        )


def refuse_to_train(training: object) -> None:
    """Raises `SessionMisuseError` before NaN is saved as what was learned."""
    if training in _waiting:
        raise SessionMisuseError(
            "The model was built within init_module(), which leaves weights to the checkpoint "
            "that the run goes on from, and nobody has restored it.",
            do="Call the Checkpointer's restore() before the loop.",
        )


def _copies(state: Any, shapes: Collection[torch.Size]) -> bool:
    """Whether a tensor in it that is as big as a weight was copied before there was any number."""
    if isinstance(state, torch.Tensor):
        return state.shape in shapes and _is_blank(state)
    parts = state.values() if isinstance(state, Mapping) else state
    return isinstance(state, Mapping | list | tuple) and any(_copies(one, shapes) for one in parts)


def _is_blank(tensor: torch.Tensor) -> bool:
    """Whether all of it is NaN: most are known by their first number."""
    numbers = tensor.detach()
    if type(numbers) is not torch.Tensor or not numbers.numel() or numbers.is_meta:
        return False
    return bool(numbers[(0,) * numbers.dim()].isnan()) and bool(numbers.isnan().all())


class _Apart(TorchFunctionMode):
    """Has weights drawn with dice of their own, or NaN put where they would be.

    NaN, so that who uses one nobody restores will notice. Shards are drawn as ever, and so is what
    the user has dice for.
    """

    def __init__(self, seed: int, left_out: list[ref[Parameter]] | None) -> None:
        super().__init__()
        self._seed = seed
        self._left_out = left_out
        self._dice: dict[torch.device, torch.Generator] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        how = dict(kwargs or {})
        drawn: Any = args[0] if args else how.get("tensor")
        if func not in _DRAWS or how.get("generator") is not None:
            return func(*args, **how)
        if type(drawn) not in (Parameter, torch.Tensor) or drawn.device.type not in _HAVE_DICE:
            return func(*args, **how)
        is_weight = type(drawn) is Parameter
        if is_weight and self._left_out is not None:
            self._left_out.append(ref(drawn))
            drawn.detach().fill_(torch.nan)
            return drawn
        if is_weight or (func in _WITHIN and "generator" in how):
            how["generator"] = self._dice_on(drawn.device)
        return func(*args, **how)

    def _dice_on(self, device: torch.device) -> torch.Generator:
        if device not in self._dice:
            self._dice[device] = torch.Generator(device).manual_seed(self._seed)
        return self._dice[device]

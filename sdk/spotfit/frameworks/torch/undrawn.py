"""Weights that nobody draws at random, since a restore brings them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

import torch
from torch.nn import Parameter, init
from torch.overrides import TorchFunctionMode

from spotfit.core.errors import IntegrityError, SessionMisuseError

_DRAWS = frozenset(
    {
        init.kaiming_normal_,
        init.kaiming_uniform_,
        init.normal_,
        init.trunc_normal_,
        init.uniform_,
        init.xavier_normal_,
        init.xavier_uniform_,
        torch.Tensor.normal_,
        torch.Tensor.uniform_,
    }
)
_within: ContextVar[bool] = ContextVar("undrawn", default=False)
_waiting: WeakSet[object] = WeakSet()
"""Trainings with weights that nobody has drawn, and none restored yet."""


@contextmanager
def built(training: object, *, left_out: bool) -> Iterator[None]:
    """Weights that are made meanwhile are NaN instead of drawn, if they are to be `left_out`.

    What is drawn afterwards is the same either way.
    """
    from spotfit.frameworks.torch.state import dice, put_back  # a second of imports for few

    thrown = dice()
    try:
        if left_out:
            _waiting.add(training)
            with _undrawn():
                yield
        else:
            yield
    finally:
        put_back(thrown)


def leaves_out() -> bool:
    """Whether weights that are made now are left out."""
    return _within.get()


def brought(training: object) -> None:
    """A restore has brought all weights of that training."""
    _waiting.discard(training)


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


@contextmanager
def _undrawn() -> Iterator[None]:
    token = _within.set(True)
    try:
        with _NotDrawn():
            yield
    finally:
        _within.reset(token)


class _NotDrawn(TorchFunctionMode):
    """Has NaN put where weights would be drawn: who uses one nobody restores will notice."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        drawn = args[0] if args else kwargs.get("tensor")
        if func in _DRAWS and isinstance(drawn, Parameter):
            drawn.detach().fill_(torch.nan)
            return drawn
        return func(*args, **kwargs)

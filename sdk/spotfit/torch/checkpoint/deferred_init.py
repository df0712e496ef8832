"""Deferred weight initialization: weights that a restore will load are not drawn randomly.

`defer_init` fills such weights with NaN. `check_initialized` verifies after the restore that none
is left; the `reject_*` functions prevent training on NaN or saving it.
"""

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
from spotfit.torch.checkpoint.compatibility import summarize_names

_IN_PLACE_DRAWS = frozenset({torch.Tensor.normal_, torch.Tensor.uniform_})
"""Tensor methods through which torch.nn.init draws; it always passes `generator`, even None."""
_RANDOM_INITIALIZERS = _IN_PLACE_DRAWS | {init.kaiming_uniform_, init.normal_, init.uniform_}
"""Initializers that torch dispatches as a whole; all others end in `_IN_PLACE_DRAWS`."""
_GENERATOR_DEVICES = ("cpu", "cuda")
# A context variable: other threads may build models that must be initialized normally.
_is_deferring: ContextVar[bool] = ContextVar("deferred_init", default=False)
# Weak references: a model that the user drops must not be kept alive by its initialization.
_pending_weights: WeakKeyDictionary[object, list[ref[Parameter]]] = WeakKeyDictionary()
"""By training, the NaN weights that a restore must load."""


@contextmanager
def defer_init(training: object, *, deferred: bool) -> Iterator[None]:
    """Fill weights that the block would initialize randomly with NaN if `deferred`.

    For `init_module()`. `training` identifies the training: it is the snapshot channel, which the
    other functions of this module take as well. Otherwise the weights are drawn from a separate
    generator, seeded from torch's default RNG. Either way that RNG advances by one number only, and
    all other random numbers, in the block and after it, are the same.
    """
    # Drawn also if deferred: the default RNG then advances equally with and without a checkpoint.
    seed = int(torch.randint(2**63 - 1, ()).item())
    weights: list[ref[Parameter]] = []
    if deferred:
        _pending_weights[training] = weights
    token = _is_deferring.set(deferred)
    try:
        with _DeferredInitMode(seed, weights if deferred else None):
            yield
    finally:
        _is_deferring.reset(token)


def is_deferring_init() -> bool:
    """Return whether random initialization of weights in this thread fills them with NaN now."""
    return _is_deferring.get()


def check_initialized(training: object, stateful_objects: Mapping[str, Any]) -> None:
    """Verify after a restore that no deferred weight is NaN any more; forget these weights.

    `training` is the object that was passed to `defer_init`. Raises `ConfigError` if a weight is
    NaN, or if a state of `stateful_objects` (by name) has a NaN copy of one.
    """
    weights = [
        weight
        for reference in _pending_weights.pop(training, ())
        if (weight := reference()) is not None
    ]
    # Vectors are left out: their shapes are too common to identify a copy.
    shapes = {weight.shape for weight in weights if weight.dim() > 1}
    copies = (
        name
        for name, stateful in stateful_objects.items()
        if shapes and _has_nan_copy(stateful.state_dict(), shapes)
    )
    missing = [f"a weight of shape {tuple(one.shape)}" for one in weights if _is_all_nan(one)]
    missing += map(repr, copies)
    if missing:
        raise ConfigError(
            "Weights were left uninitialized by init_module() because the checkpoint was expected "
            "to provide them, but they are missing from it or were NaN when it was saved: "
            f"{summarize_names(missing)}.",
            do="Create in init_module() only what the Checkpointer gets, and copy weights, for "
            "example for an average of them, after restore().",
        )


def reject_missing_checkpoint(training: object) -> None:
    """Raise `IntegrityError` if weights wait for a checkpoint that no longer exists.

    Called when a restore has found no state. `training` is the object that was passed to
    `defer_init`; without deferred weights nothing happens.
    """
    if training in _pending_weights:
        raise IntegrityError(
            "The checkpoint of the run that existed in init_module(), when the model was built, is "
            "missing in restore(); the model's weights are uninitialized.",
            do="Restore the checkpoint from a backup, or use a new RunConfig(name=...).",
        )


def reject_unrestored(training: object) -> None:
    """Raise `SessionMisuseError` before weights that are still NaN are trained on or saved.

    Called at every `Checkpointer.step` and `save`. `training` is the object that was passed to
    `defer_init`; after a restore nothing happens.
    """
    if training in _pending_weights:
        raise SessionMisuseError(
            "The model was built in init_module(), which leaves its weights uninitialized until "
            "the checkpoint is restored, but restore() was not called.",
            do="Call the Checkpointer's restore() before the loop.",
        )


def _has_nan_copy(state: Any, shapes: Collection[torch.Size]) -> bool:
    """Return whether a tensor in the nested state has a weight's shape and is all NaN."""
    if isinstance(state, torch.Tensor):
        return state.shape in shapes and _is_all_nan(state)
    parts = state.values() if isinstance(state, Mapping) else state
    return isinstance(state, Mapping | list | tuple) and any(
        _has_nan_copy(part, shapes) for part in parts
    )


def _is_all_nan(tensor: torch.Tensor) -> bool:
    values = tensor.detach()
    # Subclasses, such as sharded tensors, may not support indexing; "meta" tensors have no values.
    if type(values) is not torch.Tensor or not values.numel() or values.is_meta:
        return False
    # The first element decides for nearly all tensors without reading the rest.
    return bool(values[(0,) * values.dim()].isnan()) and bool(values.isnan().all())


class _DeferredInitMode(TorchFunctionMode):
    """Replaces random initialization of parameters: by NaN, or by draws of a separate generator.

    NaN makes any use of a weight that is not restored visible. Sharded tensors, and draws with a
    generator of the user, are not affected.
    """

    def __init__(self, seed: int, deferred: list[ref[Parameter]] | None) -> None:
        super().__init__()
        self._seed = seed
        self._deferred = deferred
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        tensor: Any = args[0] if args else options.get("tensor")
        if func not in _RANDOM_INITIALIZERS or options.get("generator") is not None:
            return func(*args, **options)
        if (
            type(tensor) not in (Parameter, torch.Tensor)
            or tensor.device.type not in _GENERATOR_DEVICES
        ):
            return func(*args, **options)
        # Only parameters: the Checkpointer restores them, while other tensors may be temporary.
        is_weight = type(tensor) is Parameter
        if is_weight and self._deferred is not None:
            self._deferred.append(ref(tensor))
            # detach(): an in-place change of a leaf that requires gradients would raise.
            tensor.detach().fill_(torch.nan)
            return tensor
        # torch.nn.init draws into a detached view of the parameter and passes `generator`; a user's
        # own normal_() on a plain tensor does not, and keeps using the default RNG.
        if is_weight or (func in _IN_PLACE_DRAWS and "generator" in options):
            device = tensor.device
            if device not in self._generators:
                self._generators[device] = torch.Generator(device).manual_seed(self._seed)
            options["generator"] = self._generators[device]
        return func(*args, **options)

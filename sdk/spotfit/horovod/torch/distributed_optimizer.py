"""DistributedOptimizer: an optimizer whose gradients are reduced over all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, optim

from spotfit.core.errors import ConfigError
from spotfit.horovod.torch.gradient_buckets import GradientBuckets, GradientReduction
from spotfit.horovod.torch.gradient_compression import Compression, Compressor
from spotfit.horovod.torch.process_sets import ProcessSet, global_process_set, require_member, size
from spotfit.horovod.torch.reductions import Average, require_supported
from spotfit.host import log


def DistributedOptimizer(  # noqa: N802 - the name of Horovod
    optimizer: optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Make an optimizer use the gradients of all ranks in its `step`; return the same object.

    Gradients are reduced in buckets while the backward pass computes further ones, and `step` waits
    for them. All ranks have the same parameters in the same order. The optimizer remains one of its
    class, with its state and schedulers. It has in addition `synchronize()` and
    `skip_synchronize()`, for code that changes gradients before the step.

    With `gradient_predivide_factor` an average is divided by it before the sum, and by the rest
    afterwards. `groups` replaces the buckets: their number, or lists of parameters; `num_groups` is
    its older name. `named_parameters` is checked, and its names have no effect. Raises
    `ConfigError` for invalid arguments and for Adasum.
    """
    _check_arguments(optimizer, backward_passes_per_step, op, gradient_predivide_factor)
    trained = [one for group in optimizer.param_groups for one in group["params"]]
    if named_parameters is not None:
        _check_names(list(named_parameters), trained)
    reduction = GradientReduction(
        op=op,
        scales=(1 / gradient_predivide_factor, gradient_predivide_factor),
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    is_reduced = size() > 1 and process_set.included() and require_member(process_set) > 1
    buckets = GradientBuckets(
        [one for one in trained if one.requires_grad and is_reduced],
        reduction,
        passes=backward_passes_per_step,
        groups=num_groups if groups is None else groups,
    )
    # The object stays, because schedulers and gradient scalers refer to it. A scheduler has put a
    # `step` into it, which calls that of the previous class.
    vars(optimizer).pop("step", None)
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (_DistributedStep, kind), {})
    assert isinstance(optimizer, _DistributedStep)
    optimizer.reduce_gradients(buckets)
    return optimizer


class _DistributedStep(optim.Optimizer):
    """What the class of a distributed optimizer has in addition to the user's class."""

    _buckets: GradientBuckets
    _is_synchronized: bool
    _skips_synchronize: bool
    _opt_called: bool

    def reduce_gradients(self, buckets: GradientBuckets) -> None:
        """Reduce the gradients of each backward pass in these buckets from now on."""
        self._buckets = buckets
        self._is_synchronized = self._skips_synchronize = False
        for parameter in buckets.parameters:
            parameter.register_post_accumulate_grad_hook(buckets.add)  # type: ignore[no-untyped-call]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the reduced gradients and update the parameters, on all ranks.

        With a closure, the gradients are reduced after each call of it.
        """
        # Schedulers check by this attribute that steps have been made.
        self._opt_called = True
        if closure is not None:
            return super().step(lambda: self._reduce_after(closure))
        if not self._skips_synchronize:
            if self._is_synchronized:
                log.warning(
                    "horovod.synchronized_twice",
                    text="optimizer.step() after optimizer.synchronize() reduces gradients again",
                    do="call it in the block of optimizer.skip_synchronize()",
                )
            self.synchronize()
        self._is_synchronized = False
        return super().step()

    # By this attribute schedulers recognize a step that sets `_opt_called`.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # noqa: SLF001

    def synchronize(self) -> None:
        """Wait until the gradients of all ranks are reduced; those of the parameters are set."""
        self._buckets.finish()
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Return a context in which `step` uses gradients that `synchronize` has reduced."""
        self._skips_synchronize = True
        try:
            yield
        finally:
            self._skips_synchronize = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes per step; called between two steps."""
        self._buckets.set_passes(passes)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients. Raises `ConfigError` while they are being reduced."""
        if self._buckets.is_started:
            raise ConfigError(
                "optimizer.zero_grad() was called between loss.backward() and optimizer.step(), "
                "while gradients are being reduced.",
                do="Call it before the first backward pass of a step.",
                retryable=False,
            )
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state; gradients of an unfinished step are not reduced."""
        self._buckets.reset()
        self._is_synchronized = self._skips_synchronize = False
        super().load_state_dict(state_dict)

    def _reduce_after(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self._buckets.finish()
        return loss


def _check_arguments(optimizer: Any, passes: int, op: int, predivide_factor: float) -> None:
    require_supported(op)
    if not isinstance(optimizer, optim.Optimizer) or isinstance(optimizer, _DistributedStep):
        raise ConfigError(
            f"hvd.DistributedOptimizer() takes an optimizer of torch, not {type(optimizer)!r}"
            + (", which is distributed already." if hasattr(optimizer, "_buckets") else "."),
            do="Wrap each optimizer once.",
        )
    if not passes > 0:
        raise ConfigError(
            f"backward_passes_per_step={passes!r} must be greater than 0.",
            do="Pass the number of calls of loss.backward() before each optimizer.step().",
        )
    if predivide_factor != 1.0 and (op != Average or not predivide_factor > 0):
        raise ConfigError(
            f"gradient_predivide_factor={predivide_factor!r} must be positive, and needs "
            "op=hvd.Average.",
            do="Omit one of them.",
        )


def _check_names(named: list[Any], trained: list[Tensor]) -> None:
    if not all(isinstance(one, tuple) and len(one) == 2 for one in named):
        raise ConfigError(
            "named_parameters must be tuples of a name and a parameter.",
            do="Pass model.named_parameters().",
        )
    repeated = sorted(name for name, count in Counter(one[0] for one in named).items() if count > 1)
    if repeated:
        raise ConfigError(
            f"named_parameters has several parameters of the names {', '.join(repeated[:3])}.",
            do="Give the parameters of several models different prefixes.",
        )
    missing = {id(one) for one in trained} - {id(one[1]) for one in named}
    if missing:
        raise ConfigError(
            f"named_parameters lacks {len(missing)} of the optimizer's {len(trained)} parameters.",
            do="Pass the named_parameters() of all models of the optimizer, or omit them.",
        )

"""Local mode (`num_workers=0`): the function runs in this process, without workers or retries."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from spotfit.client.request import FitRequest
from spotfit.client.result import Result
from spotfit.core.errors import ConfigError
from spotfit.host import log
from spotfit.ship.function import takes_config
from spotfit.worker import current
from spotfit.worker.local import LocalSession, Peers

Gathering = AbstractContextManager[Peers | None]
"""While it lasts, the processes that a launcher has started meet; None if there is none."""


def fit_here(request: FitRequest, gathering: Callable[[], Gathering] = nullcontext) -> Result:
    """Call the function and return its result; what it raises comes through as it is.

    Where a launcher has started several processes, each calls it, and has a result of its own.
    Within a training function of somebody else it is alone.
    """
    wants_config = takes_config(request.fn)
    for name in ("callbacks", "worker_runtime_env"):
        if getattr(request.run, name):
            log.warning(
                "no_effect", of=name, what_holds="num_workers=0 calls the function, no more"
            )
    with nullcontext() if current.inside() else gathering() as peers:
        session = _session(request, peers)
        value = None  # where the context swallows what is raised
        with current.entered(session), request.backend_config.train_func_context():
            value = request.fn(request.config or {}) if wants_config else request.fn()
    return Result(
        metrics=session.metrics,
        checkpoint=session.last_checkpoint,
        error=None,
        path=None,
        return_value=value,
    )


def _session(request: FitRequest, peers: Peers | None) -> LocalSession:
    name = request.run.name or ""
    if peers is None:
        return LocalSession(name, datasets=request.datasets)
    if request.datasets and peers.ranks.world_size > 1:
        raise ConfigError(
            f"`datasets` cannot be shared by the {peers.ranks.world_size} processes of a launcher.",
            do="Read the data in the training function; get_context() tells which share is whose.",
        )
    return LocalSession(peers.broadcast(name), peers, datasets=request.datasets)

"""Local mode (`num_workers=0`): the function runs in this process, without workers or retries."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from spotfit.client.request import FitRequest
from spotfit.client.result import Result
from spotfit.code.function_pickle import takes_config
from spotfit.core.errors import ConfigError
from spotfit.host import log
from spotfit.worker import current_session
from spotfit.worker.local_session import LocalSession, Peers

PeersContext = AbstractContextManager[Peers | None]
"""Context in which the processes of a launcher such as torchrun form a group.

Its value is None if there is no launcher."""


def fit_locally(
    request: FitRequest, open_peers: Callable[[], PeersContext] = nullcontext
) -> Result:
    """Call the training function in this process and return its result.

    Its exceptions propagate unchanged. With a launcher, every process calls the function and has
    its own result. A call within another training function ignores the launcher.
    """
    log.use_default_handler()
    # Before the peers are opened: a function with an invalid signature must not form a group.
    wants_config = takes_config(request.fn)
    for name in ("callbacks", "worker_runtime_env"):
        if getattr(request.run, name):
            log.warning(
                "config.ignored",
                option=name,
                reason="num_workers=0 only calls the function in this process",
            )
    # The peers of a nested call need not make the same call, so joining their group may hang.
    with nullcontext() if current_session.has_session() else open_peers() as peers:
        session = _create_session(request, peers)
        value = None  # a context manager may suppress the exception of the function
        with current_session.use_session(session), request.backend_config.train_func_context():
            value = request.fn(request.config or {}) if wants_config else request.fn()
    return Result(
        metrics=session.metrics,
        checkpoint=session.last_checkpoint,
        error=None,
        path=None,
        return_value=value,
    )


def _create_session(request: FitRequest, peers: Peers | None) -> LocalSession:
    name = request.run.name or ""
    if peers is None:
        return LocalSession(name, datasets=request.datasets)
    # Each process would train on the complete dataset.
    if request.datasets and peers.ranks.world_size > 1:
        raise ConfigError(
            f"datasets= is not supported with {peers.ranks.world_size} processes of a launcher.",
            do="Read the data in the training function, and shard it by the rank and world size "
            "of spotfit.get_context().",
        )
    # Default names contain the time, so they differ between processes.
    return LocalSession(peers.broadcast(name), peers, datasets=request.datasets)

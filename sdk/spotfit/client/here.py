"""Local mode (`num_workers=0`): the function runs in this process, without workers or retries."""

from __future__ import annotations

from spotfit.client.request import FitRequest
from spotfit.client.result import Result
from spotfit.ship.function import takes_config
from spotfit.worker import current
from spotfit.worker.local import LocalSession


def fit_here(request: FitRequest) -> Result:
    """Call the function and return its result; what it raises comes through as it is."""
    wants_config = takes_config(request.fn)
    session = LocalSession(request.run.name or "", datasets=request.datasets)
    with current.entered(session):
        value = request.fn(request.config or {}) if wants_config else request.fn()
    return Result(
        metrics=session.metrics,
        checkpoint=session.last_checkpoint,
        error=None,
        path=None,
        return_value=value,
    )

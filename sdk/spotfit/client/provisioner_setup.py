"""The provisioner of a request, and prewarming of its backend while the driver prepares the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from spotfit.client.request import FitRequest
from spotfit.core.errors import SpotfitError
from spotfit.core.ids import Token
from spotfit.host import log
from spotfit.model.group import GroupPlan, GroupRequest
from spotfit.provision.api import Provisioner, prewarm
from spotfit.provision.profile import open_provisioner

PREFLIGHT_TOKEN = Token("t-preflight")
"""Token of plans that are only checked and never submitted."""


class PlannedGroup(NamedTuple):
    """A provisioner, and its plan for all workers of the run."""

    provisioner: Provisioner
    plan: GroupPlan


def plan_group(request: FitRequest) -> PlannedGroup:
    """Open the request's provisioner and plan a group for the maximum number of workers.

    Raises `ConfigError` for an unknown provisioner, invalid options or unavailable resources.
    """
    name, options = request.resolve_provisioner()
    provisioner = open_provisioner(name, options)
    # The maximum: an elastic run may grow to it, and its plan is the one most likely to be invalid.
    group = GroupRequest(
        token=PREFLIGHT_TOKEN,
        num_workers=request.scaling.max_workers,
        total_workers=request.scaling.max_workers,
        resources_per_worker=request.scaling.worker_resources,
    )
    return PlannedGroup(provisioner, provisioner.plan(group))


@contextmanager
def prewarm_backend(request: FitRequest) -> Iterator[None]:
    """Let the backend start free preparations, such as local processes, within the context.

    Errors are only logged here; the preflight checks report them. See `provision.api.prewarm` and
    decision 0033.
    """
    with ExitStack() as prewarming:
        try:
            group = plan_group(request)
            prewarming.enter_context(prewarm(group.provisioner, group.plan, request.framework))
        # OSError: starting a process may fail for lack of memory or process ids.
        except (SpotfitError, OSError) as error:
            log.debug("fit.prewarm_skipped", reason=str(error))
        yield

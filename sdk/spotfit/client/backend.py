"""Who gives the machines, and how they get warm while the driver is still busy with itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from spotfit.client.request import FitRequest
from spotfit.core.errors import SpotfitError
from spotfit.core.ids import Token
from spotfit.host import log
from spotfit.model.group import GroupPlan, GroupRequest
from spotfit.provision.api import Provisioner, warming
from spotfit.provision.registry import open_provisioner


class Planned(NamedTuple):
    """A backend, and the group that the whole run would take of it."""

    provisioner: Provisioner
    plan: GroupPlan


def planned(request: FitRequest) -> Planned:
    """The backend that the request names. Raises `ConfigError` for what it cannot give."""
    name, options = request.chosen_provisioner()
    provisioner = open_provisioner(name, options)
    width, needs = request.scaling.max_workers, request.scaling.worker_resources
    group = GroupRequest(Token("t-preflight"), width, width, needs, run_url="", run_name="")
    return Planned(provisioner, provisioner.plan(group))


@contextmanager
def warmed(request: FitRequest) -> Iterator[None]:
    """While this is open the backend may begin what costs nothing, if it has such: see `warming`.

    Whatever is wrong is told by those who check the request, not here.
    """
    with ExitStack() as warm:
        try:
            backend = planned(request)
            warm.enter_context(warming(backend.provisioner, backend.plan, request.framework))
        except (SpotfitError, OSError) as trouble:
            log.debug("fit.cold", why=str(trouble))
        yield

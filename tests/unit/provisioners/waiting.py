"""Waits of tests for simulated clouds and clusters, which run real processes."""

from __future__ import annotations

from collections.abc import Callable

from spotfit.host.system import SystemClock
from spotfit.model.group import GroupHandle, GroupStatus, NodeState
from spotfit.provision.api import Provisioner

TIMEOUT_S = 60.0
"""A process may miss a SIGTERM directly after its fork; it is then killed after 30 s."""
_POLL_INTERVAL_S = 0.02


def until(condition: Callable[[], object]) -> None:
    """Return once `condition` is true; fail after `TIMEOUT_S`."""
    clock = SystemClock()
    deadline_s = clock.now() + TIMEOUT_S
    while not condition():
        assert clock.now() < deadline_s
        clock.wait(_POLL_INTERVAL_S)


def wait_for_state(provisioner: Provisioner, handle: GroupHandle, state: NodeState) -> GroupStatus:
    """Return the status of a group once its first machine is in `state`."""
    until(lambda: provisioner.observe(handle).nodes[0].state is state)
    return provisioner.observe(handle)

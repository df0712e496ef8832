"""A stand-in for the agent, and the town its tests play in: it tells that it is up, and waits.

Everything waits for a pipe or for the end of a process, nothing for a clock.
"""

import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.ids import RunId, Token
from spotfit.model.group import GroupHandle, GroupRequest, GroupStatus
from spotfit.provision.launch import Assignment, Launch
from spotfit_localsim.live import pool
from spotfit_localsim.live.options import LocalOptions
from spotfit_localsim.live.places import Root
from spotfit_localsim.live.processes import Process, find, here, kill
from spotfit_localsim.live.provisioner import LocalProvisioner
from tests.house.tree import ROOT as REPOSITORY

AGENT = f"{__name__}:serve"
SECRET = "the key of the run"
PATIENCE_S = 60
ONE_WRITE = select.PIPE_BUF
"""So many bytes are written and read at once, whoever else writes."""
TOLD = ("SPOTFIT_HOST", "SPOTFIT_NOTICE_FILE", "SPOTFIT_SCRATCH", "TMPDIR", "FLAVOUR")


def serve(assignment: Assignment, **_: Any) -> int:
    """The agent: starts a worker, says who it is, and ends with the code it is told."""
    town = Path(assignment.launch.run_url)
    worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    order = town / f"{assignment.token}-{assignment.node}-{os.getpid()}"
    os.mkfifo(order)
    told = {
        "token": assignment.token,
        "node": assignment.node,
        "slots": assignment.slots,
        "secret": assignment.launch.secret,
        "machine": str(here()),
        "worker": worker.pid,
        "group": os.getpgid(0),
        "argv": Path("/proc/self/cmdline").read_text().split("\0"),
        "environment": {name: os.environ.get(name) for name in TOLD},
    }
    with (town / "up").open("wb", buffering=0) as up:
        up.write(json.dumps(told).encode().ljust(ONE_WRITE))
    with order.open() as orders:
        code = int(orders.read())
    worker.communicate(b"\n")
    print(f"the stand-in ends with code {code}", flush=True)
    return code


@dataclass(frozen=True)
class Up:
    """An agent that said it is up."""

    town: Path
    told: dict[str, Any]

    @property
    def machine(self) -> Process:
        machine = Process.parse(self.told["machine"])
        assert machine is not None
        return machine

    def end(self, code: int = 0) -> None:
        """Let it return."""
        order = self.town / f"{self.told['token']}-{self.told['node']}-{self.machine.pid}"
        order.write_text(str(code))


class Town:
    """A local cloud of its own, with the stand-in for an agent."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.root = Root(folder / "root")
        self.configure(**options)
        self.launch = Launch(str(folder), RunId("run"), SECRET)
        if not (folder / "up").exists():
            os.mkfifo(folder / "up")
        self._up = os.open(folder / "up", os.O_RDWR)

    def configure(self, **options: Any) -> None:
        """Other options from here on."""
        told: dict[str, Any] = {"nodes": 2, "root": str(self.root.path), "agent": AGENT}
        self.provisioner = LocalProvisioner(LocalOptions(**told | options))

    def submit(self, token: str, workers: int, *, of: int = 4) -> GroupHandle:
        request = GroupRequest(Token(token), workers, of)
        handle = self.provisioner.submit(self.provisioner.plan(request), self.launch)
        assert isinstance(handle, GroupHandle)
        return handle

    def observe(self, handle: GroupHandle) -> GroupStatus:
        return self.provisioner.observe(handle)

    def next_up(self) -> Up:
        """The next agent that says it is up."""
        assert select.select([self._up], [], [], PATIENCE_S)[0], "no agent came up"
        return Up(self.folder, json.loads(os.read(self._up, ONE_WRITE)))

    def quiet(self) -> bool:
        """Whether no agent has said anything that was not read."""
        return not select.select([self._up], [], [], 0)[0]

    def machines(self) -> set[Process]:
        """Every machine that anybody remembers."""
        nodes = [node for group in self.root.groups() for node in group.nodes()]
        return {*self.root.machines(), *filter(None, (node.machine() for node in nodes))}

    def close(self) -> None:
        """Nobody stays, whatever the test left behind."""
        for machine in self.machines():
            kill(machine)
        os.close(self._up)


def see_out(pid: int) -> None:
    """Wait for the end of a process that is not our child."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if find(pid) is not None:
            assert select.select([watched], [], [], PATIENCE_S)[0], f"{pid} lives on"
    finally:
        os.close(watched)


def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines find this module."""
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    for name in (pool.OWNER, pool.ROOT, pool.TMPDIR):
        monkeypatch.delenv(name, raising=False)

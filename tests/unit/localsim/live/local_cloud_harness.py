"""A local cloud whose agent is replaced by a function that reports its start and waits.

Waits end with data in a pipe or with the exit of a process, not after a time.
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
from spotfit.provision.launch import AgentAssignment, AgentLaunchSpec
from spotfit_provisioners.local import machine_pool
from spotfit_provisioners.local.options import LocalOptions
from spotfit_provisioners.local.processes import (
    ProcessIdentity,
    current_process,
    find_process,
    kill_process_tree,
)
from spotfit_provisioners.local.provisioner import LocalProvisioner
from spotfit_provisioners.local.state_dir import LocalCloudDir
from tests.house.tree import ROOT as REPOSITORY

AGENT = f"{__name__}:serve"
SECRET = "the key of the run"
TIMEOUT_S = 60
MESSAGE_BYTES = select.PIPE_BUF
"""Writes to a pipe are atomic up to this size."""
REPORTED_VARIABLES = ("SPOTFIT_HOST", "SPOTFIT_NOTICE_FILE", "SPOTFIT_SCRATCH", "TMPDIR", "FLAVOUR")


def serve(assignment: AgentAssignment, **_: Any) -> int:
    """The agent: starts a worker, reports its identity and exits with the code that it receives."""
    local_cloud = Path(assignment.launch_spec.run_url)
    worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    exit_code_pipe = local_cloud / f"{assignment.token}-{assignment.node}-{os.getpid()}"
    os.mkfifo(exit_code_pipe)
    message = {
        "token": assignment.token,
        "node": assignment.node,
        "slots": assignment.slots,
        "secret": assignment.launch_spec.secret,
        "machine": str(current_process()),
        "worker": worker.pid,
        "group": os.getpgid(0),
        "argv": Path("/proc/self/cmdline").read_text().split("\0"),
        "environment": {name: os.environ.get(name) for name in REPORTED_VARIABLES},
    }
    with (local_cloud / "up").open("wb", buffering=0) as up:
        up.write(json.dumps(message).encode().ljust(MESSAGE_BYTES))
    with exit_code_pipe.open() as pipe:
        code = int(pipe.read())
    worker.communicate(b"\n")
    print(f"the fake agent exits with code {code}", flush=True)
    return code


@dataclass(frozen=True)
class StartedAgent:
    """An agent that reported its start."""

    directory: Path
    message: dict[str, Any]

    @property
    def machine(self) -> ProcessIdentity:
        machine = ProcessIdentity.parse(self.message["machine"])
        assert machine is not None
        return machine

    def end(self, code: int = 0) -> None:
        """Make the agent exit."""
        exit_code_pipe = (
            self.directory / f"{self.message['token']}-{self.message['node']}-{self.machine.pid}"
        )
        exit_code_pipe.write_text(str(code))


class LocalCloudHarness:
    """A separate local cloud whose machines run `serve` as their agent."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.directory = folder
        self.root = LocalCloudDir(folder / "root")
        self.configure(**options)
        self.launch = AgentLaunchSpec(str(folder), RunId("run"), SECRET)
        if not (folder / "up").exists():
            os.mkfifo(folder / "up")
        self._up_pipe = os.open(folder / "up", os.O_RDWR)

    def configure(self, **options: Any) -> None:
        """Use these options for the next calls."""
        options_with_defaults: dict[str, Any] = {
            "nodes": 2,
            "root": str(self.root.path),
            "agent": AGENT,
        }
        self.provisioner = LocalProvisioner(LocalOptions(**options_with_defaults | options))

    def submit(self, token: str, workers: int, *, of: int = 4) -> GroupHandle:
        request = GroupRequest(token=Token(token), num_workers=workers, total_workers=of)
        handle = self.provisioner.submit(self.provisioner.plan(request), self.launch)
        assert isinstance(handle, GroupHandle)
        return handle

    def observe(self, handle: GroupHandle) -> GroupStatus:
        return self.provisioner.observe(handle)

    def next_agent(self) -> StartedAgent:
        """The next agent that reports its start."""
        assert select.select([self._up_pipe], [], [], TIMEOUT_S)[0], "no agent started"
        return StartedAgent(self.directory, json.loads(os.read(self._up_pipe, MESSAGE_BYTES)))

    def is_quiet(self) -> bool:
        """Whether no message of an agent is unread."""
        return not select.select([self._up_pipe], [], [], 0)[0]

    def machines(self) -> set[ProcessIdentity]:
        """Every machine in the state directory or recorded by a node."""
        nodes = [node for group in self.root.groups() for node in group.nodes()]
        return {*self.root.machines(), *filter(None, (node.machine() for node in nodes))}

    def close(self) -> None:
        """Kill all machines."""
        for machine in self.machines():
            kill_process_tree(machine)
        os.close(self._up_pipe)


def wait_for_exit(pid: int) -> None:
    """Wait for the exit of a process that is not a child of this one."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if find_process(pid) is not None:
            assert select.select([watched], [], [], TIMEOUT_S)[0], f"{pid} is still running"
    finally:
        os.close(watched)


def make_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this module importable on machines."""
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    for name in (machine_pool.OWNER_ENV, machine_pool.ROOT_ENV, machine_pool.TMPDIR_ENV):
        monkeypatch.delenv(name, raising=False)

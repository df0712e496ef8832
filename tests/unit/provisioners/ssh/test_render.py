"""Rendering of shell scripts for hosts, and their execution by sh on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.host.system import SystemClock
from spotfit.model.group import GroupRequest
from spotfit_provisioners.ssh import render, states
from spotfit_provisioners.ssh.offers import list_offers
from spotfit_provisioners.ssh.options import SshOptions
from tests.unit.provisioners import golden

GOLDEN = Path(__file__).parent / "golden"


def a_request(workers: int = 2, **resources: float) -> GroupRequest:
    return GroupRequest(
        token=Token("t-0123456789ab"),
        num_workers=workers,
        total_workers=workers,
        resources_per_worker=resources,
        run_name="Digits 1",
    )


@pytest.mark.parametrize(
    ("name", "request_", "options"),
    [
        ("plain", a_request(), SshOptions(hosts=("a", "me@b"))),
        (
            "gpus",
            a_request(8, GPU=1.0),
            SshOptions(
                hosts=("a", "b", "c"),
                workers_per_node=4,
                setup=(". /opt/venv/bin/activate", "export NCCL_SOCKET_IFNAME=ib0"),
                command_prefix="apptainer exec --nv /shared/spotfit.sif",
                python="python3",
                environment={"NCCL_DEBUG": "WARN it"},
                grace_s=90.0,
            ),
        ),
    ],
)
def test_plan_matches_its_golden_file(
    name: str, request_: GroupRequest, options: SshOptions
) -> None:
    golden.check_golden(
        msgspec.to_builtins(render.plan(request_, options)), GOLDEN / f"plan_{name}.json"
    )


@pytest.mark.parametrize("name", ["survey", "start", "look", "stop", "undo", "check"])
def test_script_matches_its_golden_file(name: str) -> None:
    place = render.machine_path(".spotfit/ssh", "me@a", "t-0123456789ab", 1)
    options = SshOptions(hosts=("me@a",), setup=(". venv/bin/activate",), environment={"A": "1 2"})
    scripts = {
        "survey": lambda: render.host_status_script(place, "! who | grep -q ."),
        "start": lambda: render.start_script(place, "exec agent", {"KEY": "it's"}),
        "look": lambda: render.machine_status_script(place),
        "stop": lambda: render.stop_script(place, 30.0),
        "undo": lambda: render.remove_script(place),
        "check": lambda: render.check_script(options),
    }
    golden.check_golden(scripts[name]().splitlines(), GOLDEN / f"script_{name}.json")


def test_hosts_have_one_offer() -> None:
    options = SshOptions(hosts=("a",), prices={"*": {"spot": 1, "on_demand": 2}})
    listing = list_offers(options)
    (offer,) = listing.offers
    assert (offer.name, listing.default) == ("ssh/on_demand", "ssh/on_demand")
    request = replace(a_request(1), offer=offer)
    assert render.plan(request, options) == render.plan(replace(request, offer=None), options)
    with pytest.raises(ConfigError, match="ssh/on_demand"):
        render.plan(request, SshOptions(hosts=("a",), prices={"*": {"spot": 1}}))


def test_missing_hosts_name_the_option() -> None:
    with pytest.raises(ConfigError, match="hosts") as error_info:
        render.plan(a_request(), SshOptions())
    assert "SPOTFIT_SSH_HOSTS" in error_info.value.do


def test_multiline_values_are_rejected() -> None:
    with pytest.raises(ConfigError, match="line breaks"):
        render.plan(a_request(), SshOptions(hosts=("a", "b"), command_prefix="a\nb"))


class Host:
    """This machine as a host; each call is a new shell."""

    def __init__(self, folder: Path, shell: str) -> None:
        self.folder = folder
        self._shell = shell

    def place(self, number: int = 0) -> str:
        return render.machine_path(str(self.folder), "me@a", "t-1", number)

    def run(self, script: str) -> str:
        done = subprocess.run(
            [self._shell, "-s"],
            input=script,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
            env={"PATH": os.environ["PATH"], "HOME": str(self.folder)},
        )
        return done.stdout.strip()

    def start(self, agent: str, number: int = 0, **environment: str) -> str:
        return self.run(render.start_script(self.place(number), agent, environment))

    def machine_status(self, number: int = 0) -> str:
        """Return the first line: state and exit code."""
        return self.run(render.machine_status_script(self.place(number))).splitlines()[0].rstrip()

    def host_status(self, free_if: str = "") -> str:
        return self.run(render.host_status_script(self.place(), free_if))

    def note(self, name: str, number: int = 0) -> Path:
        return Path(self.place(number)) / name

    def until(self, condition: Callable[[], object]) -> None:
        clock = SystemClock()
        deadline = clock.now() + 60
        while not condition():
            assert clock.now() < deadline
            clock.wait(0.05)


@pytest.fixture(params=["dash", "bash"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    """The shells that are /bin/sh on common hosts."""
    if shutil.which(request.param) is None:
        pytest.skip(f"there is no {request.param}")
    host = Host(tmp_path / f"by-{request.param}", request.param)
    yield host
    for number in range(2):
        host.run(render.remove_script(host.place(number)))


real_time = pytest.mark.real_time("real shells and processes")


@real_time
def test_agent_gets_its_environment_and_exit_code_is_recorded(host: Host) -> None:
    assert host.start('echo "$KEY"; exit 75', KEY="it's a secret") == "started"
    host.until(lambda: host.machine_status() == "over 75")
    assert host.note("log").read_text() == "it's a secret\n"
    assert host.host_status() == "free 75\n0"
    status = states.parse_node_status(host.run(render.machine_status_script(host.place())))
    assert status.started_at_ms == int(host.note("pid").stat().st_mtime) * 1000
    assert status.ended_at_ms == int(host.note("code").stat().st_mtime) * 1000


@real_time
def test_host_runs_one_agent_and_records_its_token(host: Host) -> None:
    assert host.machine_status() == "unknown"
    assert host.host_status() == "free -"
    assert host.start("exec sleep 100") == "started"
    assert host.start("exec sleep 100") == "known"
    assert host.start("exec sleep 100", number=1) == "busy"
    assert host.machine_status() == "running"
    assert host.host_status() == "busy -\n0"


@real_time
def test_sigterm_reaches_the_agent_and_its_exit_code_is_recorded(host: Host) -> None:
    host.start("trap 'exit 85' TERM; echo ready; while :; do sleep 0.05; done")
    host.until(lambda: host.note("log").read_text() == "ready\n")
    host.run(render.stop_script(host.place(), 20.0))
    host.until(lambda: host.machine_status() == "over 85")


@real_time
def test_agent_that_ignores_sigterm_is_killed_with_its_descendants(host: Host) -> None:
    """Includes processes in other sessions."""
    host.start("trap '' TERM; setsid sleep 100 & echo ready; while :; do sleep 0.05; done")
    host.until(lambda: host.note("log").read_text() == "ready\n")
    host.run(render.stop_script(host.place(), 1.0))
    host.until(lambda: host.machine_status() == "over")
    assert host.host_status() == "free -\n0"


@real_time
def test_leftover_processes_are_killed_before_the_host_is_free(host: Host) -> None:
    host.start("setsid sleep 100 & exit 70")
    host.until(lambda: host.machine_status() == "over 70")
    assert host.host_status() == "free 70\n0"


@real_time
def test_host_in_use_by_another_user_is_not_free(host: Host) -> None:
    assert host.host_status("false") == "occupied -"
    Path(f"{Path(host.place()).parent}.closed").touch()
    assert host.host_status() == "closed -"


@real_time
def test_state_files_are_private_and_the_umask_of_agents_is_kept(host: Host) -> None:
    host.run(f"umask 022\n{render.start_script(host.place(), 'umask', {})}")
    host.until(lambda: host.machine_status() == "over 0")
    assert host.note("log").read_text() == "0022\n"
    assert host.note("log").stat().st_mode & 0o077 == 0


@real_time
def test_secrets_are_in_no_command_line_and_no_file(host: Host) -> None:
    secret = "Zm9yIG5vYm9keSdzIGV5ZXM="
    host.start("exec sleep 100", KEY=secret)
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):  # processes of other tests may end
            lines.append(path.read_bytes())
    assert lines
    assert not any(secret.encode() in line for line in lines)
    notes = [path for path in host.folder.rglob("*") if path.is_file()]
    assert notes
    assert not any(secret.encode() in note.read_bytes() for note in notes)


@real_time
def test_undone_machine_leaves_no_trace(host: Host) -> None:
    host.start("exec sleep 100")
    host.run(render.remove_script(host.place()))
    assert host.machine_status() == "unknown"
    assert host.start("exec sleep 100") == "started"

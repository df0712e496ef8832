"""A real Slurm cluster for tests: controller and nodes as processes of this machine, no systemd.

Debian's slurmd can run several times on one machine, each with its node name and port. All files
are in one folder, and all processes end with the test.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

COMMANDS = ("slurmctld", "slurmd", "munged", "sbatch", "squeue", "scontrol", "scancel", "sinfo")
ACCOUNTING_COMMANDS = ("slurmdbd", "sacctmgr", "mariadbd", "mariadb-install-db")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_TIMEOUT_S = 90.0
_POLL_INTERVAL_S = 0.05

requires_slurm = pytest.mark.skipif(
    not all(shutil.which(command, path=_PATH) for command in COMMANDS),
    reason="Slurm (slurmctld, slurmd, slurm-client, munge) is not installed; `.ci/servers` as root",
)

requires_slurm_accounting = pytest.mark.skipif(
    not all(shutil.which(command, path=_PATH) for command in (*COMMANDS, *ACCOUNTING_COMMANDS)),
    reason="Slurm's accounts (slurmdbd, mariadb-server-core) are not installed; "
    "`.ci/servers` as root",
)


class SlurmCluster:
    """Nodes n1, n2, … of two CPUs each in the partition 'spot', which 'urgent' preempts.

    With accounting there is the account 'lab' with the QOS 'normal', 'low' and 'high'; 'high'
    preempts 'low' in all partitions.
    """

    def __init__(self, folder: Path, nodes: int, *, accounting: bool = False) -> None:
        self.folder = folder
        self.nodes = nodes
        self.accounting = _SlurmAccounting(self) if accounting else None
        self.conf = folder / "slurm.conf"
        self._daemons: list[subprocess.Popen[bytes]] = []
        for part in ("state", "spool"):
            (folder / part).mkdir()

    def start(self) -> None:
        """Wait until all nodes are idle."""
        socket_ = self.folder / "munge.socket"
        self._start_munge(socket_)
        kept = self.accounting.start(socket_) if self.accounting else _NO_ACCOUNTING
        self.conf.write_text(_format_configuration(self.folder, socket_, self.nodes, kept))
        if self.accounting:
            self.accounting.create_accounts()
        self.start_daemon("slurmctld", "-D", "-c")
        for number in range(1, self.nodes + 1):
            self.start_daemon("slurmd", "-D", "-c", "-N", f"n{number}")
        self.wait_until(
            lambda: (
                len(self.run_command("sinfo", "-hN", "-p", "spot", "-t", "idle").split("\n"))
                > self.nodes
            )
        )

    def run_command(self, *arguments: str) -> str:
        """Return the output of a Slurm command; '' if it fails."""
        done = subprocess.run(
            arguments,
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout if done.returncode == 0 else ""

    def jobs(self, *fields: str) -> list[list[str]]:
        """Return all current and recent tasks by these fields of `squeue --Format`."""
        wanted = ",".join(f"{field}:|" for field in fields)
        result = self.run_command(
            "squeue", "--noheader", "--array", "--states=all", f"--Format={wanted}"
        )
        return [line.split("|")[: len(fields)] for line in result.splitlines() if line.strip()]

    def running_jobs(self) -> list[str]:
        """Return the ids of the running jobs."""
        return [job for job, state in self.jobs("JobID", "State") if state == "RUNNING"]

    def stop(self) -> None:
        """Cancel all jobs, wait for them, and end the daemons."""
        if self.conf.exists() and all(daemon.poll() is None for daemon in self._daemons):
            self.run_command("scancel", "--full", "--user", getpass.getuser())
            with contextlib.suppress(AssertionError):
                self.wait_until(lambda: not self.run_command("squeue", "-h").strip())
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _start_munge(self, socket_: Path) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        paths = {
            "key-file": key,
            "socket": socket_,
            "pid-file": self.folder / "munged.pid",
            "log-file": self.folder / "munged.log",
            "seed-file": self.folder / "munged.seed",
        }
        self.start_daemon(
            "munged", "--foreground", "--force", *(f"--{n}={p}" for n, p in paths.items())
        )
        self.wait_until(socket_.exists)

    def start_daemon(self, command: str, *arguments: str) -> None:
        """Start a daemon that ends with the cluster."""
        path = shutil.which(command, path=_PATH)
        assert path is not None
        log = (self.folder / f"{command}.out").open("ab")
        with log:
            self._daemons.append(
                subprocess.Popen(
                    (path, *arguments), env=self._environment(), stdout=log, stderr=log
                )
            )

    def _environment(self) -> dict[str, str]:
        return {"PATH": _PATH, "HOME": str(self.folder), "SLURM_CONF": str(self.conf)}

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait for the condition, at most 90 s. Fails at once if a daemon has exited."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not condition():
            for daemon in self._daemons:
                assert daemon.poll() is None, f"{daemon.args!r} exited; see {self.folder}"
            assert time.monotonic() < deadline, f"see {self.folder}"
            time.sleep(_POLL_INTERVAL_S)


_NO_ACCOUNTING = (
    "AccountingStorageType=accounting_storage/none",
    "PreemptType=preempt/partition_prio",
)


class _SlurmAccounting:
    """MariaDB and slurmdbd in the folder of the cluster, which QOS need."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self._cluster = cluster
        self._folder = cluster.folder / "accounts"

    def start(self, munge: Path) -> Sequence[str]:
        """Start both; return the settings of the controller."""
        self._folder.mkdir()
        data = self._folder / "data"
        arguments = ("--no-defaults", f"--datadir={data}", f"--user={getpass.getuser()}")
        made = subprocess.run(
            ("mariadb-install-db", *arguments, "--skip-test-db"), capture_output=True, check=False
        )
        assert made.returncode == 0, made.stderr
        base, port = _free_ports(2)
        socket_ = self._folder / "db.socket"
        self._cluster.start_daemon(
            "mariadbd",
            *arguments,
            "--skip-grant-tables",  # loopback only
            "--bind-address=127.0.0.1",
            f"--port={base}",
            f"--socket={socket_}",
            f"--pid-file={self._folder}/db.pid",
            "--innodb-lock-wait-timeout=900",
        )
        self._cluster.wait_until(socket_.exists)
        self._write_configuration(munge, port=port, base=base)
        self._cluster.start_daemon("slurmdbd", "-D")
        self._cluster.wait_until(lambda: _is_listening(port))
        return (
            "AccountingStorageType=accounting_storage/slurmdbd",
            "AccountingStorageHost=127.0.0.1",
            f"AccountingStoragePort={port}",
            f"AccountingStoragePass={munge}",
            "AccountingStorageEnforce=associations,limits,qos",
            "PreemptType=preempt/qos",
        )

    def create_accounts(self) -> None:
        """Create the account, its user, and one QOS that preempts another."""
        user = getpass.getuser()
        for arguments in (
            ("add", "cluster", "lab"),
            ("add", "account", "lab", "cluster=lab"),
            ("add", "qos", "low", "priority=1", "gracetime=5", "preemptmode=requeue"),
            ("add", "qos", "high", "priority=100", "preempt=low"),
            ("add", "qos", "forbidden"),
            ("add", "user", user, "account=lab", "cluster=lab"),
            ("modify", "user", user, "set", "qos=normal,low,high"),
        ):
            self._cluster.run_command("sacctmgr", "-i", *arguments)
        result = self._cluster.run_command("sacctmgr", "-nP", "show", "assoc", "format=user,qos")
        assert "low" in result, f"see {self._folder}"

    def _write_configuration(self, munge: Path, *, port: int, base: int) -> None:
        conf = self._cluster.folder / "slurmdbd.conf"
        user = getpass.getuser()
        conf.write_text(
            f"AuthType=auth/munge\nAuthInfo=socket={munge}\nDbdHost=localhost\n"
            f"DbdAddr=127.0.0.1\nDbdPort={port}\nSlurmUser={user}\n"
            f"StorageType=accounting_storage/mysql\nStorageHost=127.0.0.1\nStoragePort={base}\n"
            f"StorageUser={user}\nStorageLoc=slurm\nLogFile={self._folder}/slurmdbd.log\n"
            f"PidFile={self._folder}/slurmdbd.pid\n"
        )
        conf.chmod(0o600)


def _is_listening(port: int) -> bool:
    with contextlib.closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def run_slurm_cluster(
    folder: Path, nodes: int, *, accounting: bool = False
) -> Iterator[SlurmCluster]:
    """Run a cluster. Commands use it with SLURM_CONF set to its `conf`."""
    cluster = SlurmCluster(folder, nodes, accounting=accounting)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def _format_configuration(folder: Path, munge: Path, nodes: int, accounting: Sequence[str]) -> str:
    """Short intervals, and settings that need no privileges. A requeued job waits `cred_expire`."""
    host, user = socket.gethostname().partition(".")[0], getpass.getuser()
    controller, *ports = _free_ports(nodes + 1)
    size = "CPUs=2 Boards=1 SocketsPerBoard=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=2000"
    partition = f"Nodes=n[1-{nodes}] MaxTime=INFINITE State=UP OverSubscribe=EXCLUSIVE"
    lines = [
        "ClusterName=lab",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={controller}",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        "AuthType=auth/munge",
        f"AuthInfo=socket={munge},cred_expire=5",
        "CredType=cred/munge",
        f"StateSaveLocation={folder}/state",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmctldLogFile={folder}/slurmctld.log",
        f"SlurmdPidFile={folder}/slurmd.%n.pid",
        f"SlurmdLogFile={folder}/slurmd.%n.log",
        f"SlurmdSpoolDir={folder}/spool/%n",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        *accounting,
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "SchedulerType=sched/backfill",
        "SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=100000",
        "SlurmdParameters=config_overrides",
        "SlurmctldParameters=preempt_send_user_signal",
        "PreemptMode=REQUEUE",
        "ReturnToService=2",
        "SlurmdTimeout=20",
        "SlurmctldTimeout=10",
        "KillWait=5",
        "JobRequeue=1",
        "MpiDefault=none",
        "MailProg=/bin/true",
        *(
            f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} {size}"
            for number, port in enumerate(ports, 1)
        ),
        f"PartitionName=spot {partition} Default=YES PriorityTier=1 PreemptMode=REQUEUE "
        "GraceTime=5",
        f"PartitionName=urgent {partition} PriorityTier=10 PreemptMode=OFF",
    ]
    return "\n".join(lines) + "\n"


def _free_ports(count: int) -> Sequence[int]:
    """Return distinct free ports; all are bound at the same time."""
    with contextlib.ExitStack() as held:
        found: list[int] = []
        # Not those that the kernel gives to connections: one of other processes may get such a port
        # before the daemon starts, which then exits.
        for port in random.SystemRandom().sample(range(20_000, 32_000), 12_000):
            one = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                break
        return found

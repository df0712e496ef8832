"""Slurm's commands, and its complaints in our words. Nothing is decided here."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from spotfit.core.errors import (
    MachineError,
    ProvisionError,
    ProvisionPermissionError,
    QuotaError,
)
from spotfit.host import env
from spotfit_provisioners.slurm.states import Task, read

_CALL_S = 60.0
_FIELDS = "ArrayJobID:|,ArrayTaskID:|,State:|,Reason:|,exit_code:|"
_KEPT = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "SLURM_CONF")
"""What commands and tasks see of our environment: nothing of a job that we may be in ourselves,
and none of our credentials."""

_PASSING = (
    "unable to contact",
    "socket timed out",
    "connection refused",
    "connection reset",
    "communication",
    "standby mode",
    "temporarily",
    "zero bytes",
    "maintenance",
    "protocol authentication error",
    "munge",
)
_LIMITS = ("policy", "limit", "quota")
_RIGHTS = ("permi", "denied", "account", "not authorized", "user id", "invalid qos")
_FORGOTTEN = ("invalid job id", "already completing or completed", "already finished")


class Slurm:
    """The cluster that this machine is a part of. Raises our errors for what waiting does not
    cure, and `MachineError` for the rest."""

    def submit(self, arguments: Sequence[str], script: str, environment: Mapping[str, str]) -> int:
        """An array that is held back; its number. What is secret is in the environment only,
        which Slurm shows to nobody but its administrators."""
        words = ("sbatch", "--parsable", "--hold", "--export=ALL", *arguments)
        told = self._run(words, script=script, environment=environment)
        return int(told.partition(";")[0])

    def would_take(self, arguments: Sequence[str], script: str) -> str:
        """What sbatch says of such a job without submitting it."""
        self._run(("sbatch", "--test-only", *arguments), script=script)
        return "sbatch --test-only agrees"

    def tasks_of(self, job: str) -> list[Task]:
        """Of that array; none if Slurm has forgotten it."""
        return self._tasks(f"--jobs={job}")

    def tasks_named(self, name: str) -> list[Task]:
        """Of all arrays of ours by that name."""
        return self._tasks(f"--user={os.getuid()}", f"--name={name}")

    def release(self, job: int) -> None:
        """No longer hold it back; of one that is not held, nothing."""
        self._run(("scontrol", "release", str(job)), bygone=True)

    def cancel(self, job: str) -> None:
        """The array, and whatever runs of it; what is over already is no error."""
        self._run(("scancel", job), bygone=True)

    def output_of(self, task: str) -> str:
        """Path of the file that it writes; '' of one that Slurm has forgotten."""
        told = self._run(("scontrol", "--oneliner", "show", "job", task), bygone=True)
        return dict(_pairs(told)).get("StdOut", "")

    def settings(self) -> dict[str, str]:
        """How the cluster is set up."""
        lines = self._run(("scontrol", "show", "config")).splitlines()
        pairs = (line.partition("=") for line in lines if "=" in line)
        return {name.strip(): value.strip() for name, _, value in pairs}

    def partition(self, name: str) -> dict[str, str]:
        """What is set for that partition; '' is the cluster's default one. {} if there is none."""
        lines = self._run(("scontrol", "--oneliner", "show", "partition")).splitlines()
        every = [dict(_pairs(line)) for line in lines]
        wanted = ("PartitionName", name) if name else ("Default", "YES")
        return next((one for one in every if wanted in one.items()), {})

    def associations(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """What we may be charged to: account, partition ('' for any) and the QOS of each."""
        words = ("sacctmgr", "--noheader", "--parsable2", "show", "associations")
        me = pwd.getpwuid(os.getuid()).pw_name
        told = self._run((*words, f"user={me}", "format=account,partition,qos"))
        rows = [line.split("|") for line in told.splitlines() if line.count("|") == 2]
        return [(account, part, tuple(qos.split(","))) for account, part, qos in rows]

    def groups(self) -> tuple[str, ...]:
        """Ours, by name."""
        return tuple(grp.getgrgid(number).gr_name for number in os.getgroups())

    def _tasks(self, *which: str) -> list[Task]:
        words = ("squeue", "--noheader", "--array", "--states=all", f"--Format={_FIELDS}", *which)
        lines = self._run(words, bygone=True).splitlines()
        return [task for line in lines if line.strip() for task in read(line)]

    def _run(
        self,
        words: Sequence[str],
        *,
        script: str = "",
        environment: Mapping[str, str] | None = None,
        bygone: bool = False,
    ) -> str:
        """What it prints. `bygone`: that a job is over or forgotten is no error."""
        try:
            done = subprocess.run(  # noqa: S603  # Slurm's own commands, no shell
                (_found(words[0]), *words[1:]),
                input=script,
                env={**_of_ours(), **(environment or {})},
                capture_output=True,
                text=True,
                timeout=_CALL_S,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            raise MachineError(f"{words[0]} has not answered within {_CALL_S:.0f} s.") from late
        if done.returncode == 0 or (bygone and _tells(done.stderr, _FORGOTTEN)):
            return done.stdout
        raise complaint(words[0], done.stderr.strip())


def complaint(command: str, message: str) -> ProvisionError | MachineError:
    """What a command complained of: a `MachineError` for what may pass."""
    told = " ".join(message.split()) or "no reason given"
    if _tells(message, _PASSING):
        return MachineError(f"{command}: {told}")
    if _tells(message, _LIMITS):
        return QuotaError(
            f"A limit of the cluster stands against this ({command}): {told}",
            do="`sacctmgr show assoc` and `scontrol show partition` tell the limits; ask for "
            "less, or choose another partition, account or QOS.",
        )
    if _tells(message, _RIGHTS):
        return ProvisionPermissionError(
            f"The cluster does not allow this ({command}): {told}",
            do="Choose an account, QOS and partition that are yours: SlurmOptions(account=…, "
            "qos=…, partitions=…).",
        )
    return ProvisionError(
        f"Slurm does not take this ({command}): {told}",
        do="Correct SlurmOptions; `spotfit doctor --provisioner slurm` tries them.",
    )


def _pairs(line: str) -> Iterator[tuple[str, str]]:
    for word in line.split():
        name, equals, value = word.partition("=")
        if equals:
            yield name, value


def _tells(message: str, words: Sequence[str]) -> bool:
    return any(word in message.lower() for word in words)


def _of_ours() -> dict[str, str]:
    return {name: value for name in _KEPT if (value := env.lookup(name)) is not None}


def _found(command: str) -> str:
    path = shutil.which(command)
    if path is None:
        raise ProvisionError(
            f"There is no {command} on this machine's PATH.",
            do="Start the run from a login node of the cluster, and see to it that its nodes "
            "have Slurm's commands, too: they ask for replacements.",
        )
    return path

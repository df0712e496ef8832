"""Calls of Slurm's commands, and translation of their errors. Contains no decisions."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from spotfit.core.errors import (
    InfrastructureError,
    ProvisionError,
    ProvisionPermissionError,
    QuotaError,
)
from spotfit.host import env, machine
from spotfit_provisioners.slurm.states import SlurmTask, parse_tasks

# Commands repeat their requests themselves while the controller is busy.
_COMMAND_TIMEOUT_S = 60.0
_SQUEUE_FORMAT = "ArrayJobID:|,ArrayTaskID:|,State:|,Reason:|,exit_code:|,StartTime:|,EndTime:|"
# Seconds since 1970 instead of the local time of this machine:
# https://slurm.schedmd.com/squeue.html#OPT_SLURM_TIME_FORMAT
_SQUEUE_ENVIRONMENT = {"SLURM_TIME_FORMAT": "%s"}
# Environment variables that commands and tasks inherit. SLURM_… variables of a surrounding job
# would change the submission, and credentials of the caller must not be exported.
_PASSED_VARIABLES = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "SLURM_CONF")

# Slurm's commands report errors only as text. The words are from Slurm's error messages.
_TRANSIENT_WORDS = (
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
_QUOTA_WORDS = ("policy", "limit", "quota")
_PERMISSION_WORDS = ("permi", "denied", "account", "not authorized", "user id", "invalid qos")
_FINISHED_WORDS = ("invalid job id", "already completing or completed", "already finished")


class SlurmClient:
    """The commands of the cluster that this machine belongs to.

    Permanent errors are raised as `ProvisionError`, transient ones as `InfrastructureError`.
    """

    def submit_held(
        self, arguments: Sequence[str], script: str, environment: Mapping[str, str]
    ) -> int:
        """Submit a held array job and return its id.

        Secrets are passed in the environment only, which Slurm shows only to its administrators.
        """
        # Names of jobs are not unique in Slurm. A held duplicate is found before it starts.
        command = ("sbatch", "--parsable", "--hold", "--export=ALL", *arguments)
        output = self._run(command, script=script, environment=environment)
        return int(output.partition(";")[0])  # 'id', or 'id;cluster' in a federation

    def test_submission(self, arguments: Sequence[str], script: str) -> str:
        """Validate a job with `sbatch --test-only`, without submitting it."""
        self._run(("sbatch", "--test-only", *arguments), script=script)
        return "sbatch --test-only accepts it"

    def list_job_tasks(self, job: str) -> list[SlurmTask]:
        """Return the tasks of the array job; empty if Slurm has purged the job."""
        return self._query_tasks(f"--jobs={job}")

    def list_tasks_by_name(self, name: str) -> list[SlurmTask]:
        """Return the tasks of all array jobs of the user with that name."""
        return self._query_tasks(f"--user={os.getuid()}", f"--name={name}")

    def release(self, job: int) -> None:
        """Release a held job. No effect on a job that is not held."""
        self._run(("scontrol", "release", str(job)), allow_finished=True)

    def cancel(self, job: str) -> None:
        """Cancel the array job with all its tasks. No error if it has ended."""
        self._run(("scancel", job), allow_finished=True)

    def find_output_path(self, task: str) -> str:
        """Return the path of the task's output file; '' if Slurm has purged the task."""
        output = self._run(("scontrol", "--oneliner", "show", "job", task), allow_finished=True)
        return dict(_parse_pairs(output)).get("StdOut", "")

    def read_cluster_config(self) -> dict[str, str]:
        """Return the settings of `scontrol show config`."""
        lines = self._run(("scontrol", "show", "config")).splitlines()
        pairs = (line.partition("=") for line in lines if "=" in line)
        return {name.strip(): value.strip() for name, _, value in pairs}

    def find_partition(self, name: str) -> dict[str, str]:
        """Return the settings of a partition ('' is the default one), or {} if it is missing."""
        lines = self._run(("scontrol", "--oneliner", "show", "partition")).splitlines()
        partitions = [dict(_parse_pairs(line)) for line in lines]
        setting = ("PartitionName", name) if name else ("Default", "YES")
        return next((partition for partition in partitions if setting in partition.items()), {})

    def list_associations(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """Return account, partition ('' for any) and QOS of each association of the user."""
        command = ("sacctmgr", "--noheader", "--parsable2", "show", "associations")
        user = pwd.getpwuid(os.getuid()).pw_name
        output = self._run((*command, f"user={user}", "format=account,partition,qos"))
        rows = [line.split("|") for line in output.splitlines() if line.count("|") == 2]
        return [(account, part, tuple(qos.split(","))) for account, part, qos in rows]

    def list_own_groups(self) -> tuple[str, ...]:
        """Return the names of the user's groups."""
        return tuple(grp.getgrgid(number).gr_name for number in os.getgroups())

    def _query_tasks(self, *selection: str) -> list[SlurmTask]:
        # Ended jobs stay in the list for MinJobAge (slurm.conf), by default 300 s.
        command = (
            "squeue",
            "--noheader",
            "--array",  # one line per pending task, instead of one per job
            "--states=all",
            f"--Format={_SQUEUE_FORMAT}",
            *selection,
        )
        output = self._run(command, environment=_SQUEUE_ENVIRONMENT, allow_finished=True)
        lines = output.splitlines()
        return [task for line in lines if line.strip() for task in parse_tasks(line)]

    def _run(
        self,
        command: Sequence[str],
        *,
        script: str = "",
        environment: Mapping[str, str] | None = None,
        allow_finished: bool = False,
    ) -> str:
        """Return the output. With `allow_finished`, ended and purged jobs are no error."""
        passed = {n: value for n in _PASSED_VARIABLES if (value := env.lookup(n)) is not None}
        try:
            done = subprocess.run(  # noqa: S603  # Slurm's own commands, no shell
                (_find_command(command[0]), *command[1:]),
                input=script,
                env={**passed, **(environment or {})},
                capture_output=True,
                text=True,
                timeout=_COMMAND_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            raise InfrastructureError(
                f"The Slurm command {command[0]} did not answer within {_COMMAND_TIMEOUT_S:.0f} s.",
                do="Check with `scontrol ping` that the controller (slurmctld) responds.",
            ) from late
        if done.returncode == 0 or (allow_finished and _contains_any(done.stderr, _FINISHED_WORDS)):
            return done.stdout
        raise to_provision_error(command[0], done.stderr.strip())


def to_provision_error(command: str, message: str) -> ProvisionError | InfrastructureError:
    """Translate the error text of a command; transient errors become `InfrastructureError`."""
    text = " ".join(message.split()) or "no reason given"
    # In this order, because a message may contain words of several kinds.
    if _contains_any(message, _TRANSIENT_WORDS):
        return InfrastructureError(
            f"The Slurm command {command} failed temporarily: {text}",
            do="Check with `scontrol ping` that the controller (slurmctld) responds.",
        )
    if _contains_any(message, _QUOTA_WORDS):
        return QuotaError(
            f"A limit of the Slurm cluster is exceeded ({command}): {text}",
            do="Request fewer resources, or choose another partition, account or QOS; `sacctmgr "
            "show assoc` and `scontrol show partition` show the limits.",
        )
    if _contains_any(message, _PERMISSION_WORDS):
        return ProvisionPermissionError(
            f"Slurm denied permission ({command}): {text}",
            do="Choose an account, QOS and partition that you may use: SlurmOptions(account=…, "
            "qos=…, partitions=…).",
        )
    return ProvisionError(
        f"Slurm rejected the request ({command}): {text}",
        do="Correct SlurmOptions; `spotfit doctor --provisioner slurm` checks them.",
    )


def _parse_pairs(line: str) -> Iterator[tuple[str, str]]:
    for word in line.split():
        name, equals, value = word.partition("=")
        if equals:
            yield name, value


def _contains_any(message: str, words: Sequence[str]) -> bool:
    return any(word in message.lower() for word in words)


def _find_command(command: str) -> str:
    path = shutil.which(command)
    if path is None:
        raise ProvisionError(
            f"The command {command} is not on the PATH of {machine.hostname()}.",
            do="Start the run from a login node of the cluster. The compute nodes need Slurm's "
            "commands as well, because agents submit replacements.",
        )
    return path

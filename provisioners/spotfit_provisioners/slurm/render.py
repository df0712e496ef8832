"""Our request as an array job: pure, and pinned by golden files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from spotfit.core.errors import ConfigError
from spotfit.model.group import GroupPlan, GroupRequest
from spotfit.provision.launch import COMMAND, Exit
from spotfit.provision.sizing import nodes_for
from spotfit_provisioners.kit import hardware
from spotfit_provisioners.kit.names import label
from spotfit_provisioners.slurm.options import SlurmOptions

BACKEND = "slurm"
MAX_NODES = 1000
"""Slurm's own MaxArraySize is 1001 unless a cluster says otherwise, and counts from 0."""
ARRAY_INDEX = "SLURM_ARRAY_TASK_ID"


def plan(request: GroupRequest, options: SlurmOptions) -> GroupPlan:
    """The words for sbatch and the script it is given. Neither holds a secret."""
    hardware.check(request.resources_per_worker, backend="Slurm")
    slots = options.workers_per_node
    nodes = nodes_for(request, slots=slots, max_nodes=MAX_NODES, backend="Slurm")
    if "\n" in "".join((options.container, options.python, *options.modules)):
        raise ConfigError("SlurmOptions: container, python and modules are one line each.")
    body = {
        "arguments": list(_arguments(request, options, nodes)),
        "script": script(options),
    }
    return GroupPlan(request.token, BACKEND, nodes, slots, body)


def _arguments(request: GroupRequest, options: SlurmOptions, nodes: int) -> Iterator[str]:
    slots, per_worker = options.workers_per_node, request.resources_per_worker
    gpus = hardware.gpus(per_worker, slots)
    named = {
        "partition": ",".join(options.partitions),
        "account": options.account,
        "qos": options.qos,
        "constraint": options.constraint,
        "exclude": options.exclude,
        "reservation": options.reservation,
        "time": options.time,
        "gres": f"{options.gres}:{gpus}" if gpus else "",
        "mem": _memory(request, options),
        "chdir": options.folder,
        "output": options.output,
    }
    yield f"--job-name={request.token}"
    yield f"--comment=spotfit {label(request.run_name or 'run')}"
    yield f"--array=0-{nodes - 1}"
    yield from ("--nodes=1", "--ntasks=1", f"--cpus-per-task={hardware.cpus(per_worker, slots)}")
    yield from ("--requeue", "--open-mode=append", f"--signal=B:TERM@{int(options.grace_s)}")
    yield from (f"--{name}={value}" for name, value in named.items() if value)
    if options.exclusive:
        yield "--exclusive"
    yield from options.extra


def output(options: SlurmOptions, token: str, job: str, node: int) -> str:
    """Where that task writes, as far as what sbatch puts into a name is known to us."""
    blanks = {"%x": token, "%A": job, "%a": str(node), "%%": "%"}
    name = re.sub("%[xAa%]", lambda blank: blanks[blank[0]], options.output)
    return str(Path(options.folder or Path.cwd(), name))


def _memory(request: GroupRequest, options: SlurmOptions) -> str:
    per_worker, per_cpu_gib = request.resources_per_worker, options.memory_per_cpu_gib
    if "memory" not in per_worker and not per_cpu_gib:
        return ""
    slots = options.workers_per_node
    return f"{hardware.memory_mib(per_worker, slots, per_cpu_gib=per_cpu_gib)}M"


def script(options: SlurmOptions) -> str:
    """What each task runs: an agent, and after it Slurm's word for 'once more' if that is due.

    The agent is a child of the shell and no job step, so that nothing but the shell stands between
    it and a signal. A shell hears signals only between two commands, hence the loop around `wait`;
    what it hears before there is an agent is passed on to it.
    A task that is no longer RUNNING has been cancelled, or is being requeued already.
    """
    variables = {"SPOTFIT_SIGNAL_GRACE_S": str(options.grace_s), **options.environment}
    command = " ".join(filter(None, (options.container, options.python, *COMMAND[1:])))
    lines = [
        "#!/bin/bash",
        "agent= noticed=",
        """trap 'noticed=1; [ -z "$agent" ] || kill -TERM "$agent" 2>/dev/null' TERM""",
        *(f"module load {shlex.quote(module)}" for module in options.modules),
        *options.setup,
        *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
        f"{command} &",
        "agent=$!",
        '[ -z "$noticed" ] || kill -TERM "$agent" 2>/dev/null',
        """while kill -0 "$agent" 2>/dev/null; do wait "$agent"; done""",
        'wait "$agent"',
        "code=$?",
        f'if [ "$code" = {int(Exit.DRAINED)} ] && '
        '[ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "    sleep 60  # until Slurm ends this",
        "fi",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"

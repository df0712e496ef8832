"""Pure translation of a group request to an array job; checked against golden files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from spotfit.core.errors import ConfigError
from spotfit.model.group import GroupPlan, GroupRequest
from spotfit.provision.launch import AGENT_COMMAND, AgentExitCode, count_nodes
from spotfit.provision.offers import select_offer
from spotfit_provisioners.job_fields import hardware
from spotfit_provisioners.job_fields.names import to_label
from spotfit_provisioners.slurm import offers
from spotfit_provisioners.slurm.options import SlurmOptions

BACKEND = "slurm"
MAX_NODES = 1000
"""The default MaxArraySize of Slurm is 1001, an exclusive bound of array indexes."""
ARRAY_INDEX_VARIABLE = "SLURM_ARRAY_TASK_ID"


def plan(request: GroupRequest, options: SlurmOptions) -> GroupPlan:
    """Return the sbatch arguments and the batch script; neither contains secrets."""
    hardware.check_resources(request.resources_per_worker, backend="Slurm")
    slots = options.workers_per_node
    nodes = count_nodes(request, slots=slots, max_nodes=MAX_NODES, backend="Slurm")
    if "\n" in "".join((options.command_prefix, options.python, *options.modules)):
        raise ConfigError(
            f"SlurmOptions(command_prefix={options.command_prefix!r}, python={options.python!r}, "
            f"modules={options.modules!r}) must not contain line breaks.",
            do="Remove the line breaks; shell lines belong in setup=(…).",
        )
    offer = select_offer(
        request,
        offers.list_offers(options).offers,
        do="For on-demand machines, set SlurmOptions(on_demand_partitions=…) or on_demand_qos; "
        "else list the offers again.",
    )
    body = {
        "arguments": list(_sbatch_arguments(request, options, nodes)),
        "script": batch_script(options),
        **({"offer": offer.name} if offer is not None else {}),
    }
    return GroupPlan(
        token=request.token, provisioner=BACKEND, num_nodes=nodes, slots_per_node=slots, body=body
    )


def _sbatch_arguments(request: GroupRequest, options: SlurmOptions, nodes: int) -> Iterator[str]:
    slots, per_worker = options.workers_per_node, request.resources_per_worker
    gpus = hardware.count_gpus(per_worker, slots)
    per_cpu_gib = options.memory_per_cpu_gib
    share = hardware.GpuShare(hardware.DEFAULT_GPU_SHARE.cpus, memory_gib=0)
    memory_mib = hardware.required_memory_mib(
        per_worker, slots, per_cpu_gib=per_cpu_gib, share=share
    )
    has_limit = "memory" in per_worker or per_cpu_gib > 0
    if has_limit:
        # With ConstrainRAMSpace, --mem is a limit: https://slurm.schedmd.com/cgroup.conf.html
        hardware.check_memory_limit(per_worker, slots, limit_mib=memory_mib, backend="Slurm")
    selected = request.offer.options if request.offer is not None else {}
    optional = {
        "partition": selected.get(offers.PARTITION) or ",".join(options.partitions),
        "account": options.account,
        "qos": selected.get(offers.QOS) or options.qos,
        "constraint": options.constraint,
        "exclude": options.exclude,
        "reservation": options.reservation,
        # Of every attempt, from its start. sbatch rounds up to minutes.
        "time": options.time or _format_time(request.time_limit_s),
        "gres": f"{options.gres}:{gpus}" if gpus else "",
        # Otherwise the cluster's default (DefMemPerCPU, DefMemPerNode).
        "mem": f"{memory_mib}M" if has_limit else "",
        "chdir": options.work_dir,
        "output": options.output,
    }
    yield f"--job-name={request.token}"
    comment = f"spotfit {to_label(request.run_name or 'run')}"
    yield f"--comment={comment}{' ' + request.run_id if request.run_id else ''}"
    yield f"--array=0-{nodes - 1}"
    yield from ("--nodes=1", "--ntasks=1")
    yield f"--cpus-per-task={hardware.count_cpus(per_worker, slots)}"
    # Requeued attempts append to one output file. 'B:' signals the batch script, which forwards it.
    yield from ("--requeue", "--open-mode=append", f"--signal=B:TERM@{int(options.grace_s)}")
    yield from (f"--{name}={value}" for name, value in optional.items() if value)
    if options.exclusive:
        yield "--exclusive"
    # Last, because sbatch uses the last value of a repeated option.
    yield from options.extra_args


def _format_time(seconds: int | None) -> str:
    """Return minutes:seconds, a format of --time; '' for no limit."""
    return "" if seconds is None else f"{seconds // 60}:{seconds % 60:02d}"


def output_path(options: SlurmOptions, token: str, *, job: str, node: int) -> str:
    """Return the output path of a task; only the patterns %x, %A, %a and %% are replaced."""
    values = {"%x": token, "%A": job, "%a": str(node), "%%": "%"}
    name = re.sub("%[xAa%]", lambda pattern: values[pattern[0]], options.output)
    return str(Path(options.work_dir or Path.cwd(), name))


def batch_script(options: SlurmOptions) -> str:
    """Return the script of each task: run an agent, and requeue the task if the agent drained.

    The agent is a child of the shell and not a job step, so that the shell can forward SIGTERM. A
    signal interrupts `wait`, hence the loop. A signal that arrives before the agent has started is
    forwarded afterwards.
    """
    # Only a RUNNING task is requeued: otherwise it was cancelled, or is being requeued already.
    variables = {"SPOTFIT_SIGNAL_GRACE_S": str(options.grace_s), **options.environment}
    command = " ".join(filter(None, (options.command_prefix, options.python, *AGENT_COMMAND[1:])))
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
        f'if [ "$code" = {int(AgentExitCode.DRAINED)} ] && '
        '[ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "    sleep 60  # until Slurm ends this",
        "fi",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"

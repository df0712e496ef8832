"""Our request in the words of AWS Batch: pure, and pinned by golden files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spotfit.core.errors import ConfigError
from spotfit.model.group import GroupPlan, GroupRequest
from spotfit.provision.launch import COMMAND, Exit
from spotfit.provision.sizing import nodes_for
from spotfit_provisioners.aws_batch.options import AwsBatchOptions
from spotfit_provisioners.kit import hardware
from spotfit_provisioners.kit.names import content_name, label

BACKEND = "aws_batch"
MAX_NODES = 10_000
ARRAY_INDEX = "AWS_BATCH_JOB_ARRAY_INDEX"

RETRIES: Sequence[Mapping[str, str]] = (
    {"onStatusReason": "Host EC2*", "action": "RETRY"},
    {"onExitCode": str(int(Exit.DRAINED)), "action": "RETRY"},
    {"onReason": "*", "action": "EXIT"},
    {"onExitCode": "*", "action": "EXIT"},
)
"""The first that matches counts; without a match Batch tries again, hence the last two."""


def plan(request: GroupRequest, options: AwsBatchOptions) -> GroupPlan:
    """What will be asked for: a job definition by its content, and the shape of the job."""
    mistakes = [name for name in ("queues", "image") if not getattr(options, name)]
    if mistakes:
        raise ConfigError(
            f"AwsBatchOptions is incomplete: {', '.join(mistakes)} not given.",
            do="Say it in the call, in SPOTFIT_AWS_BATCH_…, or under [aws_batch] in spotfit.toml; "
            "infra/terraform/stacks/aws makes queues and prints them.",
        )
    hardware.check(request.resources_per_worker, backend="AWS Batch")
    slots = options.workers_per_node
    nodes = nodes_for(request, slots=slots, max_nodes=MAX_NODES, backend="AWS Batch")
    definition = _definition(request, options)
    body = {
        "definition": {"jobDefinitionName": content_name(definition), **definition},
        "queues": list(options.queues),
        "tags": {"spotfit:run": label(request.run_name or "run"), **options.tags},
    }
    return GroupPlan(request.token, BACKEND, nodes, slots, body)


def job(
    plan: GroupPlan, *, queue: str, definition: str, environment: Mapping[str, str], share: str
) -> dict[str, Any]:
    """The arguments of `submit_job`: an array only where there are two machines or more."""
    array = {"arrayProperties": {"size": plan.nodes}} if plan.nodes > 1 else {}
    fair = {"shareIdentifier": share} if share else {}
    return {
        "jobName": plan.token,
        "jobQueue": queue,
        "jobDefinition": definition,
        "containerOverrides": {
            "environment": [{"name": name, "value": environment[name]} for name in environment]
        },
        "tags": {**plan.body["tags"], "spotfit:token": plan.token},
        "propagateTags": True,
        **array,
        **fair,
    }


def children(job_id: str, nodes: int) -> list[str]:
    """The ids of a group's jobs, machine by machine."""
    return [job_id] if nodes == 1 else [f"{job_id}:{node}" for node in range(nodes)]


def _definition(request: GroupRequest, options: AwsBatchOptions) -> dict[str, Any]:
    return {
        "type": "container",
        "platformCapabilities": ["EC2"],
        "containerProperties": _container(request, options),
        "retryStrategy": {
            "attempts": options.attempts,
            "evaluateOnExit": [dict(rule) for rule in RETRIES],
        },
        "propagateTags": True,
    }


def _container(request: GroupRequest, options: AwsBatchOptions) -> dict[str, Any]:
    slots, per_worker = options.workers_per_node, request.resources_per_worker
    cpus, gpus = hardware.cpus(per_worker, slots), hardware.gpus(per_worker, slots)
    memory = hardware.memory_mib(per_worker, slots, per_cpu_gib=options.memory_per_cpu_gib)
    needs = [("VCPU", cpus), ("MEMORY", memory), *([("GPU", gpus)] if gpus else [])]
    roles = {"jobRoleArn": options.job_role, "executionRoleArn": options.execution_role}
    return {
        "image": options.image,
        "command": list(COMMAND),
        "resourceRequirements": [{"type": kind, "value": str(n)} for kind, n in needs],
        "linuxParameters": {
            "sharedMemorySize": options.shared_memory_mib or memory // 2,
            "initProcessEnabled": True,
        },
        **{name: arn for name, arn in roles.items() if arn},
    }

"""Pure translation of a group request to AWS Batch requests; checked against golden files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spotfit.core.errors import ConfigError
from spotfit.model.group import GroupPlan, GroupRequest
from spotfit.model.offer import Market, Offer
from spotfit.provision.launch import AGENT_COMMAND, AgentExitCode, count_nodes
from spotfit_provisioners.aws_batch.instance_types import gpu_share
from spotfit_provisioners.aws_batch.options import AwsBatchOptions
from spotfit_provisioners.job_fields import hardware
from spotfit_provisioners.job_fields.names import allocation_labels, content_addressed_name
from spotfit_provisioners.job_fields.offers import check_offer, unrentable_offer_error

BACKEND = "aws_batch"
# https://docs.aws.amazon.com/batch/latest/userguide/array_jobs.html: 2 to 10,000 children
MAX_NODES = 10_000
ARRAY_INDEX_VARIABLE = "AWS_BATCH_JOB_ARRAY_INDEX"
LOG_GROUP = "/aws/batch/job"
"""The log group of Batch jobs, unless a job definition sets another one."""
_UNLIMITED_MEMLOCK: Mapping[str, Any] = {"name": "memlock", "softLimit": -1, "hardLimit": -1}
QUEUE_TAG = "spotfit:queue"
"""Tag of jobs: the name of their queue, without region and account."""

RETRY_RULES: Sequence[Mapping[str, str]] = (
    # The reason that Batch documents for a terminated spot instance.
    {"onStatusReason": "Host EC2*", "action": "RETRY"},
    # The agent saved its state before the announced end of its machine.
    {"onExitCode": str(int(AgentExitCode.DRAINED)), "action": "RETRY"},
    {"onReason": "*", "action": "EXIT"},
    {"onExitCode": "*", "action": "EXIT"},
)
"""The first matching rule applies. Batch retries if no rule matches, hence the last two rules."""


def plan(request: GroupRequest, options: AwsBatchOptions) -> GroupPlan:
    """Return the job definition, queues and tags of the group. Raises `ConfigError`."""
    missing = [name for name in ("queues", "image") if not getattr(options, name)]
    if missing:
        raise ConfigError(
            f"AwsBatchOptions is incomplete: {', '.join(missing)} not set.",
            do="Set the options in the call, as SPOTFIT_AWS_BATCH_…, or under [aws_batch] in "
            "spotfit.toml; infra/terraform/stacks/aws creates queues and outputs their names.",
        )
    hardware.check_resources(request.resources_per_worker, backend="AWS Batch")
    slots = options.workers_per_node
    nodes = count_nodes(request, slots=slots, max_nodes=MAX_NODES, backend="AWS Batch")
    definition = _job_definition(request, options)
    body: dict[str, Any] = {
        "definition": {"jobDefinitionName": content_addressed_name(definition), **definition},
        **_place(request.offer, options),
        "tags": {
            **options.tags,
            **allocation_labels(
                "spotfit:",
                run=request.run_name,
                run_id=request.run_id,
                user=options.user,
                project=options.cost_project,
            ),
        },
        # The region of each queue is resolved by `submit`: the default one is read from files.
        **({"region": request.network} if request.network else {}),
    }
    if request.time_limit_s is not None:
        # Of every attempt, from its start; at least 60 s:
        # https://docs.aws.amazon.com/batch/latest/userguide/job_timeouts.html
        body["timeout"] = {"attemptDurationSeconds": max(60, request.time_limit_s)}
    return GroupPlan(
        token=request.token, provisioner=BACKEND, num_nodes=nodes, slots_per_node=slots, body=body
    )


def _place(offer: Offer | None, options: AwsBatchOptions) -> dict[str, Any]:
    """Return the queues to which the group may be submitted; of an offer, only its own queue."""
    if offer is None:
        return {"queues": list(options.queues)}
    check_offer(offer, provisioner=BACKEND, machine_types=options.instance_types)
    is_on_demand = offer.market is Market.ON_DEMAND
    name = "on_demand_queues" if is_on_demand else "queues"
    queues = options.on_demand_queues if is_on_demand else options.queues
    queue = offer.options.get("queue", "")
    if queue not in queues:
        raise unrentable_offer_error(
            offer,
            f"AwsBatchOptions({name}) is {queues}"
            + (f", without {queue!r}." if queue else f", without a queue in {offer.region}."),
            do="Add a job queue with compute environments of type EC2 to "
            "AwsBatchOptions(on_demand_queues=…); infra/terraform/stacks/aws creates one."
            if is_on_demand
            else "Add the queue to AwsBatchOptions(queues=…), or name an offer of another queue.",
        )
    return {"queues": [queue], "offer": {"name": offer.name, "market": offer.market.value}}


def job_request(
    plan: GroupPlan, *, queue: str, definition: str, environment: Mapping[str, str], share: str
) -> dict[str, Any]:
    """Return the arguments of `submit_job`."""
    # AWS rejects array jobs of size 1, and share identifiers without a scheduling policy.
    array = {"arrayProperties": {"size": plan.num_nodes}} if plan.num_nodes > 1 else {}
    fair = {"shareIdentifier": share} if share else {}
    # Not in the job definition, which the groups of a run share.
    timeout = {"timeout": plan.body["timeout"]} if "timeout" in plan.body else {}
    return {
        "jobName": plan.token,
        "jobQueue": queue,
        "jobDefinition": definition,
        "containerOverrides": {
            "environment": [{"name": name, "value": environment[name]} for name in environment]
        },
        # The policies of infra/terraform allow to terminate only jobs with the tag of their queue.
        "tags": {
            **plan.body["tags"],
            "spotfit:token": plan.token,
            QUEUE_TAG: queue.rpartition("/")[2],
        },
        "propagateTags": True,
        **array,
        **fair,
        **timeout,
    }


def _efa_devices(count: int) -> list[dict[str, Any]]:
    # https://docs.aws.amazon.com/batch/latest/userguide/efa.html
    paths = [f"/dev/infiniband/uverbs{number}" for number in range(count)]
    access = ["READ", "WRITE", "MKNOD"]
    return [{"hostPath": path, "containerPath": path, "permissions": access} for path in paths]


def _log_configuration(group: str) -> dict[str, Any]:
    options = {"awslogs-group": group, "awslogs-stream-prefix": "spotfit"}
    return {"logConfiguration": {"logDriver": "awslogs", "options": options}}


def child_job_ids(job_id: str, nodes: int) -> list[str]:
    """Return the job id of every machine of the group."""
    # The ids of children are part of the API, so no request is needed to find them.
    return [job_id] if nodes == 1 else [f"{job_id}:{node}" for node in range(nodes)]


def _job_definition(request: GroupRequest, options: AwsBatchOptions) -> dict[str, Any]:
    slots, per_worker = options.workers_per_node, request.resources_per_worker
    gpus = hardware.count_gpus(per_worker, slots)
    share = gpu_share(options.instance_types, gpus)
    cpus = hardware.count_cpus(per_worker, slots, share=share)
    memory = hardware.required_memory_mib(
        per_worker, slots, per_cpu_gib=options.memory_per_cpu_gib, share=share
    )
    shared_memory = options.shared_memory_mib or memory // 2
    # MEMORY is a hard limit: "If your container attempts to exceed the memory specified, the
    # container is terminated" (ResourceRequirement in the API's model).
    hardware.check_memory_limit(
        per_worker, slots, limit_mib=memory, shared_memory_mib=shared_memory, backend="AWS Batch"
    )
    needs = [("VCPU", cpus), ("MEMORY", memory), *([("GPU", gpus)] if gpus else [])]
    roles = {"jobRoleArn": options.job_role, "executionRoleArn": options.execution_role}
    container = {
        "image": options.image,
        "command": list(AGENT_COMMAND),
        "resourceRequirements": [{"type": kind, "value": str(n)} for kind, n in needs],
        "linuxParameters": {
            # In MiB. Docker's default of 64 MiB is too small for data loaders and NCCL.
            "sharedMemorySize": shared_memory,
            # As process 1 the agent would have to reap orphans, and would ignore default signals.
            "initProcessEnabled": True,
            **({"devices": _efa_devices(options.efa_devices)} if options.efa_devices else {}),
        },
        # RDMA pins its buffers in memory.
        **({"ulimits": [_UNLIMITED_MEMLOCK]} if options.efa_devices else {}),
        **(_log_configuration(options.log_group) if options.log_group != LOG_GROUP else {}),
        # An empty text is not a valid ARN.
        **{name: arn for name, arn in roles.items() if arn},
    }
    return {
        "type": "container",
        # Not Fargate, which has neither GPUs nor a shared memory size.
        "platformCapabilities": ["EC2"],
        "containerProperties": container,
        "retryStrategy": {
            "attempts": options.attempts,
            "evaluateOnExit": [dict(rule) for rule in RETRY_RULES],
        },
        # Otherwise the tags would not appear on the ECS tasks.
        "propagateTags": True,
    }

"""Our request in the words of Google Cloud Batch: pure, and pinned by golden files."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.model.group import GroupPlan, GroupRequest
from spotfit.provision.launch import COMMAND, Exit
from spotfit.provision.sizing import nodes_for
from spotfit_provisioners.gcp_batch.options import GcpBatchOptions
from spotfit_provisioners.gcp_batch.states import HOST_LOST
from spotfit_provisioners.kit import hardware
from spotfit_provisioners.kit.names import label

BACKEND = "gcp_batch"
TASK_INDEX = "BATCH_TASK_INDEX"
SHUTDOWN_S = 30
"""How long a VM has from the beginning of its shutdown, at best."""

RETRIED = (*sorted(HOST_LOST), int(Exit.DRAINED))
"""Exit codes after which a task is tried again; of RETRY_TASK, every other one ends it."""

_DRIVERS = (
    "/var/lib/nvidia/lib64:/usr/local/nvidia/lib64",
    "/var/lib/nvidia/bin:/usr/local/nvidia/bin",
)
"""Where Batch installs them on its image, and where CUDA's images look."""

_LET_IN = "/sbin/iptables -w -A INPUT -p tcp -j ACCEPT"
"""Container-Optimized OS lets nobody in but SSH; the network's own firewall still stands."""


def max_nodes(options: GcpBatchOptions) -> int:
    """VMs of one job: https://docs.cloud.google.com/batch/quotas."""
    return 2_000 if len(options.zones) == 1 else 4_000


def plan(request: GroupRequest, options: GcpBatchOptions) -> GroupPlan:
    """What will be asked for: a whole job, but for the environment of its tasks."""
    mistakes = [name for name in ("region", "image") if not getattr(options, name)]
    if mistakes:
        raise ConfigError(
            f"GcpBatchOptions is incomplete: {', '.join(mistakes)} not given.",
            do="Say it in the call, in SPOTFIT_GCP_BATCH_…, or under [gcp_batch] in spotfit.toml; "
            "infra/terraform/stacks/gcp makes what is needed and prints it.",
        )
    hardware.check(request.resources_per_worker, backend="Google Cloud Batch")
    slots = options.workers_per_node
    _check_gpus(hardware.gpus(request.resources_per_worker, slots), options)
    most = max_nodes(options)
    nodes = nodes_for(request, slots=slots, max_nodes=most, backend="Google Cloud Batch")
    labels = {"spotfit-run": label(request.run_name or "run"), **options.labels}
    body: dict[str, Any] = {
        "taskGroups": [_task_group(request, options, nodes)],
        "allocationPolicy": _allocation(request, options, labels),
        "labels": {**labels, "spotfit-token": label(request.token)},
    }
    if options.logs:
        body["logsPolicy"] = {"destination": "CLOUD_LOGGING"}
    return GroupPlan(request.token, BACKEND, nodes, slots, body)


def job(plan: GroupPlan, environment: Mapping[str, str]) -> dict[str, Any]:
    """The job to create: the plan, and what its tasks find in their environment."""
    (group,) = plan.body["taskGroups"]
    told = group["taskSpec"].get("environment", {}).get("variables", {})
    spec = {**group["taskSpec"], "environment": {"variables": {**told, **environment}}}
    return {**plan.body, "taskGroups": [{**group, "taskSpec": spec}]}


def job_id(token: Token) -> str:
    """Where a group is found again: a second job of that name is refused."""
    return label(token)


def request_id(token: Token) -> str:
    """The same for the same token: a request whose answer was lost may be made again."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"spotfit:{token}"))


def _check_gpus(gpus: int, options: GcpBatchOptions) -> None:
    if gpus and not (options.accelerator or options.machine_type or options.instance_template):
        raise ConfigError(
            f"Workers want {gpus} GPUs on each machine, and nothing says of which kind.",
            do="Set GcpBatchOptions(accelerator='nvidia-l4'), or a machine_type that has them.",
        )


def _task_group(request: GroupRequest, options: GcpBatchOptions, nodes: int) -> dict[str, Any]:
    """Numbers are text where the API has 64 bits for them, as JSON in Google's APIs."""
    slots, per_worker = options.workers_per_node, request.resources_per_worker
    memory = hardware.memory_mib(per_worker, slots, per_cpu_gib=options.memory_per_cpu_gib)
    needs: dict[str, Any] = {
        "cpuMilli": str(1000 * hardware.cpus(per_worker, slots)),
        "memoryMib": str(memory),
    }
    shared_mib = options.shared_memory_mib or memory // 2
    gpus = hardware.gpus(per_worker, slots)
    return {
        "taskCount": str(nodes),
        "parallelism": str(nodes),
        "taskCountPerNode": "1",
        "taskSpec": {
            "runnables": [
                {"script": {"text": _LET_IN}, "ignoreExitStatus": True},
                {"container": _container(options, shared_mib=shared_mib, gpus=gpus)},
            ],
            "computeResource": needs,
            "maxRetryCount": options.retries,
            "lifecyclePolicies": [
                {"action": "RETRY_TASK", "actionCondition": {"exitCodes": list(RETRIED)}}
            ],
            **_stays(options),
        },
    }


def _stays(options: GcpBatchOptions) -> dict[str, Any]:
    """Tell agents how long their notice leaves them, where it is not as usual."""
    if not options.notice_s:
        return {}
    grace = f"{options.notice_s + SHUTDOWN_S:g}"
    return {"environment": {"variables": {"SPOTFIT_SIGNAL_GRACE_S": grace}}}


def _container(options: GcpBatchOptions, *, shared_mib: int, gpus: int) -> dict[str, Any]:
    words = ["--network=host", "--init", f"--shm-size={shared_mib}m"]
    return {
        "imageUri": options.image,
        "entrypoint": COMMAND[0],
        "commands": list(COMMAND[1:]),
        "options": " ".join([*words, *(["--privileged"] if gpus else [])]),
        **({"volumes": list(_DRIVERS)} if gpus and options.gpu_drivers else {}),
    }


def _allocation(
    request: GroupRequest, options: GcpBatchOptions, labels: Mapping[str, str]
) -> dict[str, Any]:
    zones = [f"zones/{zone}" for zone in options.zones]
    account: dict[str, Any] = {"serviceAccount": {"email": options.service_account}}
    return {
        "location": {"allowedLocations": zones or [f"regions/{options.region}"]},
        "instances": [_machine(request, options)],
        "labels": dict(labels),
        **(account if options.service_account else {}),
        **_network(options),
    }


def _machine(request: GroupRequest, options: GcpBatchOptions) -> dict[str, Any]:
    gpus = hardware.gpus(request.resources_per_worker, options.workers_per_node)
    drivers = {"installGpuDrivers": True} if gpus and options.gpu_drivers else {}
    if options.instance_template:
        return {"instanceTemplate": options.instance_template, **drivers}
    policy: dict[str, Any] = {"provisioningModel": "SPOT"}
    if options.machine_type:
        policy["machineType"] = options.machine_type
    if gpus and options.accelerator:
        policy["accelerators"] = [{"type": options.accelerator, "count": str(gpus)}]
    if options.boot_disk_gb:
        policy["bootDisk"] = {"sizeGb": str(options.boot_disk_gb)}
    return {"policy": policy, **drivers}


def _network(options: GcpBatchOptions) -> dict[str, Any]:
    told = {"network": options.network, "subnetwork": options.subnetwork}
    interface: dict[str, Any] = {name: text for name, text in told.items() if text}
    if not options.external_ip:
        interface["noExternalIpAddress"] = True
    return {"network": {"networkInterfaces": [interface]}} if interface else {}

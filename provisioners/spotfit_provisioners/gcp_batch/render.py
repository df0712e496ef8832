"""Pure translation of a group request to a Google Cloud Batch job; checked against golden files."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.model.group import GroupPlan, GroupRequest
from spotfit.model.offer import Market, Offer
from spotfit.provision.launch import AGENT_COMMAND, AgentExitCode, count_nodes
from spotfit.provision.offers import offer_name
from spotfit_provisioners.gcp_batch.options import GcpBatchOptions
from spotfit_provisioners.gcp_batch.states import HOST_LOST_EXIT_CODES
from spotfit_provisioners.job_fields import hardware
from spotfit_provisioners.job_fields.names import allocation_labels, to_label
from spotfit_provisioners.job_fields.offers import check_offer, unrentable_offer_error

BACKEND = "gcp_batch"
TASK_INDEX_VARIABLE = "BATCH_TASK_INDEX"
SHUTDOWN_S = 30
"""Time between the start of a VM's shutdown and its end, at most (Compute Engine's limit)."""

RETRIED_EXIT_CODES = (*sorted(HOST_LOST_EXIT_CODES), int(AgentExitCode.DRAINED))
"""Exit codes after which Batch retries a task. With RETRY_TASK, any other code ends the task."""

# Where Batch installs the drivers on its VM image, and where CUDA images look for them.
_DRIVER_VOLUMES = (
    "/var/lib/nvidia/lib64:/usr/local/nvidia/lib64",
    "/var/lib/nvidia/bin:/usr/local/nvidia/bin",
)
_GPU_BOOT_DISK_GB = 100
# Container-Optimized OS accepts only SSH connections; agents and workers connect to each other.
# The firewall of the VPC network still applies.
_OPEN_FIREWALL_COMMAND = "/sbin/iptables -w -A INPUT -p tcp -j ACCEPT"


def max_nodes(options: GcpBatchOptions) -> int:
    """Return the largest number of VMs of a job: https://docs.cloud.google.com/batch/quotas."""
    return 2_000 if len(options.zones) == 1 else 4_000


def plan(request: GroupRequest, options: GcpBatchOptions) -> GroupPlan:
    """Return the job without the environment of its tasks. Raises `ConfigError`."""
    missing = [name for name in ("region", "image") if not getattr(options, name)]
    if missing:
        raise ConfigError(
            f"GcpBatchOptions is incomplete: {', '.join(missing)} not set.",
            do="Set the options in the call, as SPOTFIT_GCP_BATCH_…, or under [gcp_batch] in "
            "spotfit.toml; infra/terraform/stacks/gcp creates the resources and outputs their "
            "names.",
        )
    hardware.check_resources(request.resources_per_worker, backend="Google Cloud Batch")
    slots = options.workers_per_node
    gpus = hardware.count_gpus(request.resources_per_worker, slots)
    if gpus and not (options.accelerator or options.machine_type or options.instance_template):
        raise ConfigError(
            f"The workers of a machine need {gpus} GPUs, but no GPU type is set in "
            "GcpBatchOptions.",
            do="Set GcpBatchOptions(accelerator='nvidia-l4'), or a machine_type with GPUs.",
        )
    if request.offer is not None:
        _check_offer(request.offer, options)
    limit = max_nodes(options)
    nodes = count_nodes(request, slots=slots, max_nodes=limit, backend="Google Cloud Batch")
    labels = {
        **options.labels,
        **allocation_labels(
            "spotfit-",
            run=request.run_name,
            run_id=request.run_id,
            user=options.user,
            project=options.cost_project,
        ),
    }
    body: dict[str, Any] = {
        "taskGroups": [_task_group(request, options, nodes)],
        "allocationPolicy": _allocation_policy(request, options, labels),
        "labels": {**labels, "spotfit-token": to_label(request.token)},
    }
    if options.cloud_logging:
        body["logsPolicy"] = {"destination": "CLOUD_LOGGING"}
    return GroupPlan(
        token=request.token, provisioner=BACKEND, num_nodes=nodes, slots_per_node=slots, body=body
    )


def granted_offer(job: Mapping[str, Any], options: GcpBatchOptions) -> str:
    """Return the name of the offer that a planned job rents; '' if Batch chooses among zones."""
    policy = job["allocationPolicy"]
    (instance,) = policy["instances"]
    if template := instance.get("instanceTemplate"):
        is_on_demand = template == options.on_demand_instance_template
    else:
        is_on_demand = instance["policy"]["provisioningModel"] == "STANDARD"
    locations = policy["location"]["allowedLocations"]
    if len(locations) > 1:
        return ""
    market = Market.ON_DEMAND if is_on_demand else Market.SPOT
    return offer_name(BACKEND, market, locations[0].rpartition("/")[2], options.machine_type)


def _check_offer(offer: Offer, options: GcpBatchOptions) -> None:
    """Raise `ConfigError` if the options cannot rent the offer."""
    types = (options.machine_type,) if options.machine_type else ()
    check_offer(offer, provisioner=BACKEND, region=options.region, machine_types=types)
    zone = offer.options.get("zones", "")
    is_in_region = zone.rpartition("-")[0] == options.region
    if zone and (not is_in_region or (options.zones and zone not in options.zones)):
        allowed = options.zones or f"all of {options.region}"
        raise unrentable_offer_error(
            offer,
            f"its zone is {zone}, and GcpBatchOptions(zones) are {allowed}.",
            do="Add the zone to zones, or name an offer of another zone.",
        )
    is_on_demand = offer.market is Market.ON_DEMAND
    if is_on_demand and options.instance_template and not options.on_demand_instance_template:
        raise unrentable_offer_error(
            offer,
            f"the instance template {options.instance_template!r} is one for Spot VMs.",
            do="Set GcpBatchOptions(on_demand_instance_template=…) to a template with the "
            "provisioning model STANDARD, or use machine_type without templates.",
        )


def job_request(plan: GroupPlan, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the job to create: the plan with the environment of its tasks."""
    (group,) = plan.body["taskGroups"]
    planned = group["taskSpec"].get("environment", {}).get("variables", {})
    spec = {**group["taskSpec"], "environment": {"variables": {**planned, **environment}}}
    return {**plan.body, "taskGroups": [{**group, "taskSpec": spec}]}


def job_id(token: Token) -> str:
    """Return the job id of the group. Batch rejects a second job with the same id."""
    return to_label(token)


def request_id(token: Token) -> str:
    """Return the request id of the token, with which a request can be repeated."""
    # Batch requires a UUID. This one is a function of the token, and equal for all agents.
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"spotfit:{token}"))


def _task_group(request: GroupRequest, options: GcpBatchOptions, nodes: int) -> dict[str, Any]:
    # Google's JSON APIs represent 64-bit integers as strings.
    slots, per_worker = options.workers_per_node, request.resources_per_worker
    share = _gpu_share(options)
    memory = hardware.required_memory_mib(
        per_worker, slots, per_cpu_gib=options.memory_per_cpu_gib, share=share
    )
    needs: dict[str, Any] = {
        "cpuMilli": str(1000 * hardware.count_cpus(per_worker, slots, share=share)),
        "memoryMib": str(memory),
    }
    limit_s = request.time_limit_s
    gpus = hardware.count_gpus(per_worker, slots)
    # Without a notice period, agents use the default of their own.
    grace = {"SPOTFIT_SIGNAL_GRACE_S": f"{options.notice_s + SHUTDOWN_S:g}"}
    return {
        "taskCount": str(nodes),
        # All at once, each on a VM of its own: the workers wait for each other.
        "parallelism": str(nodes),
        "taskCountPerNode": "1",
        "taskSpec": {
            "runnables": [
                # Other VM images may have neither this firewall nor the command.
                {"script": {"text": _OPEN_FIREWALL_COMMAND}, "ignoreExitStatus": True},
                {"container": _container(options, gpus=gpus)},
            ],
            "computeResource": needs,
            "maxRetryCount": options.max_retries,
            "lifecyclePolicies": [
                {"action": "RETRY_TASK", "actionCondition": {"exitCodes": list(RETRIED_EXIT_CODES)}}
            ],
            **({"environment": {"variables": grace}} if options.notice_s else {}),
            # Of every attempt of a task, from its start:
            # https://docs.cloud.google.com/batch/docs/limit-run-time
            **({"maxRunDuration": f"{limit_s}s"} if limit_s is not None else {}),
        },
    }


def _gpu_share(options: GcpBatchOptions) -> hardware.GpuShare:
    """Return the requested share of a machine per GPU; it selects the machine type if none is set.

    Containers have no limits: they use the whole VM.
    """
    if options.machine_type or options.instance_template:
        # Batch does not schedule tasks that need more than the machine has.
        return hardware.GpuShare(cpus=1, memory_gib=options.memory_per_cpu_gib)
    return hardware.DEFAULT_GPU_SHARE


def _container(options: GcpBatchOptions, *, gpus: int) -> dict[str, Any]:
    # Docker's /dev/shm has 64 MiB. That of the host has half of the VM's memory.
    shared = options.shared_memory_mib
    shared_flag = f"--shm-size={shared}m" if shared else "--ipc=host"
    # Containers get the devices of GPUs on Container-Optimized OS only with --privileged:
    # https://docs.cloud.google.com/batch/docs/create-run-job-gpus
    flags = ["--network=host", "--init", shared_flag]
    return {
        "imageUri": options.image,
        "entrypoint": AGENT_COMMAND[0],
        "commands": list(AGENT_COMMAND[1:]),
        "options": " ".join([*flags, *(["--privileged"] if gpus else [])]),
        **({"volumes": list(_DRIVER_VOLUMES)} if gpus and options.install_gpu_drivers else {}),
    }


def _allocation_policy(
    request: GroupRequest, options: GcpBatchOptions, labels: Mapping[str, str]
) -> dict[str, Any]:
    gpus = hardware.count_gpus(request.resources_per_worker, options.workers_per_node)
    offer = request.offer
    is_on_demand = offer is not None and offer.market is Market.ON_DEMAND
    template = options.on_demand_instance_template if is_on_demand else options.instance_template
    if template:
        instance: dict[str, Any] = {"instanceTemplate": template}
    else:
        policy: dict[str, Any] = {"provisioningModel": "STANDARD" if is_on_demand else "SPOT"}
        if options.machine_type:
            policy["machineType"] = options.machine_type
        # Machine types such as a2, a3 and g2 include their GPUs.
        if gpus and options.accelerator:
            policy["accelerators"] = [{"type": options.accelerator, "count": str(gpus)}]
        # Without an image Batch chooses it by the job's runnables, of which one is a script.
        disk_gb = options.boot_disk_gb or (_GPU_BOOT_DISK_GB if gpus else 0)
        disk = {"sizeGb": str(disk_gb)} if disk_gb else {}
        image = {"image": options.boot_image} if options.boot_image else {}
        if disk or image:
            policy["bootDisk"] = {**disk, **image}
        instance = {"policy": policy}
    if gpus and options.install_gpu_drivers:
        instance["installGpuDrivers"] = True
    own_zone = offer.options.get("zones") if offer is not None else None
    zones = [f"zones/{zone}" for zone in ((own_zone,) if own_zone else options.zones)]
    account: dict[str, Any] = {"serviceAccount": {"email": options.service_account}}
    names = {"network": options.network, "subnetwork": options.subnetwork}
    interface: dict[str, Any] = {field: name for field, name in names.items() if name}
    if not options.external_ip:
        interface["noExternalIpAddress"] = True
    return {
        "location": {"allowedLocations": zones or [f"regions/{options.region}"]},
        "instances": [instance],
        "labels": dict(labels),
        **(account if options.service_account else {}),
        # Without any of the options, Batch uses the default network of the project.
        **({"network": {"networkInterfaces": [interface]}} if interface else {}),
    }

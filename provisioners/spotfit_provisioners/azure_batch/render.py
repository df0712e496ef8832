"""Pure translation of a group request to an Azure Batch job, its tasks and its pool.

Checked against golden files.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.model.group import GroupPlan, GroupRequest
from spotfit.model.offer import Market, Offer
from spotfit.provision.launch import AGENT_COMMAND, AgentExitCode, count_nodes
from spotfit.provision.offers import offer_name
from spotfit_provisioners.azure_batch import prices
from spotfit_provisioners.azure_batch.options import AzureBatchOptions
from spotfit_provisioners.job_fields import hardware
from spotfit_provisioners.job_fields.names import (
    allocation_labels,
    content_addressed_name,
    to_label,
)
from spotfit_provisioners.job_fields.offers import check_offer, unrentable_offer_error

BACKEND = "azure_batch"

# How long to wait for the end of a node whose agent has drained. If the node stays, the agent is
# restarted on it. Azure gives a notice of at least 30 s, so 120 s is a safe bound.
_DRAIN_GRACE_S = 120

# Batch can retry either every exit code but 0, or none; the tasks set none. A task that still runs
# when its node is preempted is requeued, so the script keeps running after the agent has drained.
# The script contains no quotes, because it is quoted itself.
_AGENT_SCRIPT = f"""
stop() {{ stopped=1; [ -z $agent ] || kill -TERM $agent; }};
trap stop TERM;
while :; do
{shlex.join(AGENT_COMMAND)} & agent=$!;
[ -z $stopped ] || kill -TERM $agent;
while :; do wait $agent; code=$?; kill -0 $agent 2>/dev/null || break; done;
[ $code -eq {int(AgentExitCode.DRAINED)} ] || exit $code;
[ -z $stopped ] || exit $code;
agent=; sleep {_DRAIN_GRACE_S} & nap=$!; wait $nap; kill $nap 2>/dev/null;
[ -z $stopped ] || exit $code;
done
"""
# A task's command line does not run in a shell by itself.
COMMAND_LINE = shlex.join(["/bin/sh", "-c", " ".join(_AGENT_SCRIPT.split())])


def plan(request: GroupRequest, options: AzureBatchOptions) -> GroupPlan:
    """Return the job, the task without its environment, and the pool. Raises `ConfigError`."""
    if options.missing_options:
        raise ConfigError(
            f"AzureBatchOptions is incomplete: {', '.join(options.missing_options)} not set.",
            do="Set the options in the call, as SPOTFIT_AZURE_BATCH_…, or under [azure_batch] in "
            "spotfit.toml; infra/terraform/stacks/azure creates the resources and outputs their "
            "names. An existing pool needs no account_id, vm_size and identity.",
        )
    hardware.check_resources(request.resources_per_worker, backend="Azure Batch")
    slots = options.workers_per_node
    nodes = count_nodes(request, slots=slots, max_nodes=options.max_nodes, backend="Azure Batch")
    gpus = hardware.count_gpus(request.resources_per_worker, slots)
    market = _market(request.offer, options)
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
        "job": {
            "id": job_id(request.token),
            "poolInfo": {"poolId": pool_id(options, market)},
            # Until the tasks are created: a job without tasks would otherwise end at once.
            "onAllTasksComplete": "noaction",
            "onTaskFailure": "noaction",
            "metadata": [{"name": name, "value": value} for name, value in labels.items()],
        },
        "task": _task(options, gpus=gpus, time_limit_s=request.time_limit_s),
    }
    if options.can_create_pool:
        body["pool"] = pool_request(options, market, initial_nodes=nodes)
        if request.offer is not None:
            # The run may change between the markets, and its agents cannot create pools.
            other = Market.SPOT if market is Market.ON_DEMAND else Market.ON_DEMAND
            body["other_pool"] = pool_request(options, other, initial_nodes=0)
    if request.network not in ("", network(options, market)):
        body["unreachable_network"] = request.network
    return GroupPlan(
        token=request.token, provisioner=BACKEND, num_nodes=nodes, slots_per_node=slots, body=body
    )


def _market(offer: Offer | None, options: AzureBatchOptions) -> Market:
    """Return the market of the nodes. Raises `ConfigError` if the options cannot rent the offer."""
    if offer is None:
        return Market.SPOT
    types = (options.vm_size,) if options.vm_size else ()
    region = prices.region_of_endpoint(options.endpoint)
    check_offer(offer, provisioner=BACKEND, region=region, machine_types=types)
    can_rent = options.on_demand_pool or options.can_create_pool
    if offer.market is Market.ON_DEMAND and not can_rent:
        raise unrentable_offer_error(
            offer,
            f"the nodes of the pool {options.pool!r} are spot nodes.",
            do="Set AzureBatchOptions(on_demand_pool=…) to a pool with dedicated nodes as "
            "docs/guides/azure_batch.md shows, or account_id, vm_size and identity, so that "
            "spotfit creates one.",
        )
    return offer.market


def granted_offer(pool: str, options: AzureBatchOptions) -> str:
    """Return the name of the offer of the nodes of a pool."""
    region = prices.region_of_endpoint(options.endpoint)
    return offer_name(BACKEND, _market_of_pool(pool, options), region, options.vm_size)


def network(options: AzureBatchOptions, market: Market) -> str:
    """Return the network of the nodes: '' if those of both markets can connect to each other.

    Nodes of two pools reach each other only through a subnet of the user.
    """
    return "" if options.subnet else pool_id(options, market)


def network_of_pool(pool: str, options: AzureBatchOptions) -> str:
    """Return the `network` of the nodes of a pool."""
    return network(options, _market_of_pool(pool, options))


def _market_of_pool(pool: str, options: AzureBatchOptions) -> Market:
    return Market.ON_DEMAND if pool == pool_id(options, Market.ON_DEMAND) else Market.SPOT


def job_id(token: Token) -> str:
    """Return the job id of the group. Batch rejects a second job with the same id."""
    return to_label(token)


def pool_id(options: AzureBatchOptions, market: Market = Market.SPOT) -> str:
    """Return the configured pool, or a name derived from the pool's properties."""
    # Options that change the nodes give another name, so a pool never has outdated properties. The
    # formula without `initial_nodes`: the size of the first group must not change the name.
    formula = autoscale_formula(options.max_nodes, market)
    content = (options.identity, _pool_properties(options, formula))
    configured = options.on_demand_pool if market is Market.ON_DEMAND else options.pool
    return configured or content_addressed_name(content)


def task_request(plan: GroupPlan, number: int, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the task of machine `number`."""
    task = plan.body["task"]
    settings = [*task["environmentSettings"], *_environment_settings(environment)]
    return {**task, "id": str(number), "environmentSettings": settings}


def autoscale_formula(
    max_nodes: int, market: Market = Market.SPOT, *, initial_nodes: int = 0
) -> str:
    """Return the formula: one node per waiting or running task, `initial_nodes` without samples.

    A preempted node stays in the pool and counts against its target until Azure has a machine for
    it again, which may take hours: another node is added for it, also beyond `max_nodes`. Running
    tasks are completed before their nodes are removed.
    https://learn.microsoft.com/azure/batch/batch-automatic-scaling#preempted-nodes
    https://github.com/nextflow-io/nextflow/issues/5545
    """
    # The maximum of the latest sample and of the last 2 minutes: new tasks count at once, and a
    # single missing sample does not remove nodes.
    seen = "$PendingTasks.GetSample(1), $PendingTasks.GetSample(TimeInterval_Minute * 2)"
    wanted = f"wanted = $PendingTasks.Count() < 1 ? {initial_nodes} : max(0, {seen});\n"
    if market is Market.ON_DEMAND:
        return (
            f"{wanted}$TargetDedicatedNodes = min({max_nodes}, wanted);\n"
            "$TargetLowPriorityNodes = 0;\n"
            "$NodeDeallocationOption = taskcompletion;"
        )
    return (
        f"{wanted}"
        "preempted = $PreemptedNodeCount.Count() < 1 ? 0 : "
        "max(0, $PreemptedNodeCount.GetSample(1));\n"
        "$TargetDedicatedNodes = 0;\n"
        f"$TargetLowPriorityNodes = min({max_nodes}, wanted) + (wanted > 0 ? preempted : 0);\n"
        "$NodeDeallocationOption = taskcompletion;"
    )


def pool_request(
    options: AzureBatchOptions, market: Market = Market.SPOT, *, initial_nodes: int
) -> dict[str, Any]:
    """Return the Resource Manager request that creates the pool.

    Batch's own API cannot assign identities to nodes:
    https://learn.microsoft.com/azure/batch/managed-identity-pools
    """
    formula = autoscale_formula(options.max_nodes, market, initial_nodes=initial_nodes)
    return {
        "path": f"{options.account_id.rstrip('/')}/pools/{pool_id(options, market)}",
        "body": {
            "identity": {"type": "UserAssigned", "userAssignedIdentities": {options.identity: {}}},
            "properties": _pool_properties(options, formula),
        },
    }


def _pool_properties(options: AzureBatchOptions, formula: str) -> dict[str, Any]:
    names = ("publisher", "offer", "sku", "version")
    # Without public addresses, nodes need a subnet whose route reaches Azure and the bucket.
    private = {"publicIPAddressConfiguration": {"provision": "NoPublicIPAddresses"}}
    network = {"subnetId": options.subnet, **({} if options.public_ip else private)}
    return {
        "vmSize": options.vm_size,
        "deploymentConfiguration": {
            "virtualMachineConfiguration": {
                "imageReference": dict(zip(names, options.vm_image.split(":"), strict=True)),
                "nodeAgentSkuId": options.node_agent_sku,
                "containerConfiguration": {"type": "DockerCompatible"},
            }
        },
        # 5 minutes is the shortest interval that Batch allows.
        "scaleSettings": {"autoScale": {"formula": formula, "evaluationInterval": "PT5M"}},
        # Agents and workers of different nodes connect to each other.
        "interNodeCommunication": "Enabled",
        # A task has the whole machine, so that the loss of one affects one node of the run only.
        "taskSlotsPerNode": 1,
        **_pool_metadata(options),
        **({"networkConfiguration": network} if options.subnet else {}),
    }


def _pool_metadata(options: AzureBatchOptions) -> dict[str, Any]:
    """Return the metadata by which costs of the pool are attributed; a pool is shared by runs.

    Tags of the nodes would need an account with poolAllocationMode UserSubscription:
    https://learn.microsoft.com/dotnet/api/microsoft.azure.batch.cloudpool.resourcetags
    """
    project = {"spotfit-project": to_label(options.cost_project)} if options.cost_project else {}
    labels = {**options.labels, **project}
    metadata = [{"name": name, "value": value} for name, value in labels.items()]
    return {"metadata": metadata} if metadata else {}


def _task(
    options: AzureBatchOptions, *, gpus: int, time_limit_s: int | None = None
) -> dict[str, Any]:
    # The host's network and shared memory: NCCL needs both, and 64 MiB of /dev/shm are too few.
    flags = ["--network=host", "--ipc=host", "--init", *(["--gpus=all"] if gpus else [])]
    client = {"AZURE_CLIENT_ID": options.identity_client_id} if options.identity_client_id else {}
    reference = {"identityReference": {"resourceId": options.identity}}
    identity: dict[str, Any] = reference if options.identity else {}
    files = [
        {"httpUrl": url, "filePath": unquote(urlsplit(url).path).rpartition("/")[2], **identity}
        for url in options.resource_files
    ]
    registry = {"registry": {"registryServer": options.registry, **identity}}
    return {
        "commandLine": COMMAND_LINE,
        "containerSettings": {
            "imageName": options.image,
            "containerRunOptions": " ".join([*flags, *options.container_options]),
            # Batch's directory belongs to a user of the host; it is used only for resource files.
            "workingDirectory": "taskWorkingDirectory" if files else "containerImageDefault",
            **(registry if options.registry else {}),
        },
        # No retries: the script restarts a drained agent, and other exits are reported. Files stay
        # on the node for a day, as long as it is not scaled down.
        "constraints": {
            "maxTaskRetryCount": 0,
            "retentionTime": "P1D",
            # Of every attempt of the task, from its start, as an ISO 8601 duration.
            **({"maxWallClockTime": f"PT{time_limit_s}S"} if time_limit_s is not None else {}),
        },
        "environmentSettings": _environment_settings(client),
        **({"resourceFiles": files} if files else {}),
    }


def _environment_settings(environment: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in environment.items()]

"""Our request in the words of Azure Batch: pure, and pinned by golden files."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.model.group import GroupPlan, GroupRequest
from spotfit.provision.launch import COMMAND, Exit
from spotfit.provision.sizing import nodes_for
from spotfit_provisioners.azure_batch.options import AzureBatchOptions
from spotfit_provisioners.kit import hardware
from spotfit_provisioners.kit.names import content_name, label

BACKEND = "azure_batch"

_STAYS_S = 120
"""How long a machine whose agent has drained may take to go; if it stays, the agent begins anew."""

_SCRIPT = f"""
stop() {{ stopped=1; [ -z $agent ] || kill -TERM $agent; }};
trap stop TERM;
while :; do
{shlex.join(COMMAND)} & agent=$!;
[ -z $stopped ] || kill -TERM $agent;
while :; do wait $agent; code=$?; kill -0 $agent 2>/dev/null || break; done;
[ $code -eq {int(Exit.DRAINED)} ] || exit $code;
[ -z $stopped ] || exit $code;
agent=; sleep {_STAYS_S} & nap=$!; wait $nap; kill $nap 2>/dev/null;
[ -z $stopped ] || exit $code;
done
"""
"""Batch retries every exit code but 0, or none. It is told to retry none; but a task that still
runs when its node is preempted is requeued, and so a machine that is about to go keeps its task.
There are no quotes in it, for it is quoted itself."""

COMMAND_LINE = shlex.join(["/bin/sh", "-c", " ".join(_SCRIPT.split())])


def plan(request: GroupRequest, options: AzureBatchOptions) -> GroupPlan:
    """What will be asked for: a job and its tasks, but for their environment, and its pool."""
    if options.missing:
        raise ConfigError(
            f"AzureBatchOptions is incomplete: {', '.join(options.missing)} not given.",
            do="Say it in the call, in SPOTFIT_AZURE_BATCH_…, or under [azure_batch] in "
            "spotfit.toml; infra/terraform/stacks/azure makes what is needed and prints it. A pool "
            "that is there already needs no account_id, vm_size, identity.",
        )
    hardware.check(request.resources_per_worker, backend="Azure Batch")
    slots, most = options.workers_per_node, options.most_nodes
    nodes = nodes_for(request, slots=slots, max_nodes=most, backend="Azure Batch")
    gpus = hardware.gpus(request.resources_per_worker, slots)
    body: dict[str, Any] = {
        "job": _job(request, options),
        "task": _task(options, gpus=gpus),
        **({"pool": pool(options, begin_with=nodes)} if options.makes_pool else {}),
    }
    return GroupPlan(request.token, BACKEND, nodes, slots, body)


def job_id(token: Token) -> str:
    """Where a group is found again: a second job of that id is refused."""
    return label(token)


def pool_id(options: AzureBatchOptions) -> str:
    """As it is called, or after what it is made of."""
    made_of = (options.identity, _pool_properties(options, formula(options.most_nodes)))
    return options.pool or content_name(made_of)


def task(plan: GroupPlan, number: int, environment: Mapping[str, str]) -> dict[str, Any]:
    """The task of that machine."""
    told = plan.body["task"]
    settings = [*told["environmentSettings"], *_settings(environment)]
    return {**told, "id": str(number), "environmentSettings": settings}


def formula(most_nodes: int, *, begin_with: int = 0) -> str:
    """As many nodes as there are tasks that wait or run; to begin with, before anything was
    counted, so many. Tasks that run are let be.

    https://learn.microsoft.com/azure/batch/batch-automatic-scaling
    """
    seen = "$PendingTasks.GetSample(1), $PendingTasks.GetSample(TimeInterval_Minute * 2)"
    return (
        f"wanted = $PendingTasks.Count() < 1 ? {begin_with} : max(0, {seen});\n"
        "$TargetDedicatedNodes = 0;\n"
        f"$TargetLowPriorityNodes = min({most_nodes}, wanted);\n"
        "$NodeDeallocationOption = taskcompletion;"
    )


def pool(options: AzureBatchOptions, *, begin_with: int) -> dict[str, Any]:
    """The pool in the words of Resource Manager: Batch's own API gives nodes no identity.

    https://learn.microsoft.com/azure/batch/managed-identity-pools
    """
    begun = formula(options.most_nodes, begin_with=begin_with)
    return {
        "path": f"{options.account_id.rstrip('/')}/pools/{pool_id(options)}",
        "body": {
            "identity": {"type": "UserAssigned", "userAssignedIdentities": {options.identity: {}}},
            "properties": _pool_properties(options, begun),
        },
    }


def _pool_properties(options: AzureBatchOptions, formula: str) -> dict[str, Any]:
    names = ("publisher", "offer", "sku", "version")
    return {
        "vmSize": options.vm_size,
        "deploymentConfiguration": {
            "virtualMachineConfiguration": {
                "imageReference": dict(zip(names, options.vm_image.split(":"), strict=True)),
                "nodeAgentSkuId": options.node_agent,
                "containerConfiguration": {"type": "DockerCompatible"},
            }
        },
        "scaleSettings": {"autoScale": {"formula": formula, "evaluationInterval": "PT5M"}},
        "interNodeCommunication": "Enabled",
        "taskSlotsPerNode": 1,
        **_network(options),
    }


def _network(options: AzureBatchOptions) -> dict[str, Any]:
    if not options.subnet:
        return {}
    hidden = {"publicIPAddressConfiguration": {"provision": "NoPublicIPAddresses"}}
    told: dict[str, Any] = {} if options.public_ip else hidden
    return {"networkConfiguration": {"subnetId": options.subnet, **told}}


def _job(request: GroupRequest, options: AzureBatchOptions) -> dict[str, Any]:
    """It may not end by itself before it has tasks: one without any has none left to run."""
    labels = {"spotfit-run": label(request.run_name or "run"), **options.labels}
    return {
        "id": job_id(request.token),
        "poolInfo": {"poolId": pool_id(options)},
        "onAllTasksComplete": "noaction",
        "onTaskFailure": "noaction",
        "metadata": [{"name": name, "value": value} for name, value in labels.items()],
    }


def _task(options: AzureBatchOptions, *, gpus: int) -> dict[str, Any]:
    words = ["--network=host", "--ipc=host", "--init", *(["--gpus=all"] if gpus else [])]
    who = {"AZURE_CLIENT_ID": options.identity_client_id} if options.identity_client_id else {}
    files = [_file(url, options) for url in options.resource_files]
    return {
        "commandLine": COMMAND_LINE,
        "containerSettings": {
            "imageName": options.image,
            "containerRunOptions": " ".join([*words, *options.container_options]),
            # Batch's own belongs to a user of the host; only files it has laid there are a reason.
            "workingDirectory": "taskWorkingDirectory" if files else "containerImageDefault",
            **_registry(options),
        },
        "constraints": {"maxTaskRetryCount": 0, "retentionTime": "P1D"},
        "environmentSettings": _settings(who),
        **({"resourceFiles": files} if files else {}),
    }


def _registry(options: AzureBatchOptions) -> dict[str, Any]:
    if not options.registry:
        return {}
    return {"registry": {"registryServer": options.registry, **_as_identity(options)}}


def _file(url: str, options: AzureBatchOptions) -> dict[str, Any]:
    name = unquote(urlsplit(url).path).rpartition("/")[2]
    return {"httpUrl": url, "filePath": name, **_as_identity(options)}


def _as_identity(options: AzureBatchOptions) -> dict[str, Any]:
    who = {"identityReference": {"resourceId": options.identity}}
    return who if options.identity else {}


def _settings(environment: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in environment.items()]

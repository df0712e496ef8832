"""Pure translation of a group request to SkyPilot tasks; checked against golden files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.model.group import GroupPlan, GroupRequest
from spotfit.model.offer import Market
from spotfit.provision.launch import AGENT_COMMAND, AgentExitCode, count_nodes
from spotfit.provision.offers import select_offer
from spotfit_provisioners.job_fields import hardware
from spotfit_provisioners.job_fields.names import allocation_labels
from spotfit_provisioners.skypilot.offers import allowed_offers
from spotfit_provisioners.skypilot.options import SkyPilotOptions

BACKEND = "skypilot"
MAX_NODES = 500
"""Each machine is a managed job; one jobs controller does not manage more."""
SECRET_VARIABLES = ("SPOTFIT_RUN_SECRET", "SPOTFIT_STORAGE_KEYS")
"""Passed as SkyPilot secrets, which only the task can read."""
ONE_NETWORK = ("k8s", "kubernetes", "slurm", "ssh")
"""Infrastructures without regions, whose machines are in one network."""
ENDPOINT_VARIABLE = "SKYPILOT_API_SERVER_ENDPOINT"
NO_LOCAL_SERVER_VARIABLE = "SKYPILOT_DISABLE_LOCAL_API_SERVER"


def plan(request: GroupRequest, options: SkyPilotOptions) -> GroupPlan:
    """Return the task of every machine without name and environment. Raises `ConfigError`."""
    hardware.check_resources(request.resources_per_worker, backend="SkyPilot")
    slots = options.workers_per_node
    nodes = count_nodes(request, slots=slots, max_nodes=MAX_NODES, backend="SkyPilot")
    offer = select_offer(
        request,
        allowed_offers(options),
        do="Set SkyPilotOptions(infra=…) to all infrastructures that may be used, and list the "
        "offers again.",
    )
    # Jobs are placed one by one, and each would choose for itself.
    has_others = request.total_workers > slots or bool(request.network)
    network = _choose_network(request, options) if has_others else ""
    if offer is not None:
        network = offer.network
    infra = (network,) if network else options.infra
    task: dict[str, Any] = {
        "num_nodes": 1,
        "run": _agent_script(options, request.time_limit_s),
        "envs": {
            # A local API server on a machine would not know the machines of the run, and an agent
            # would rent them a second time.
            NO_LOCAL_SERVER_VARIABLE: "1",
            **({ENDPOINT_VARIABLE: options.endpoint} if options.endpoint else {}),
            **options.environment,
        },
        "resources": _resources(request, options, infra=infra),
    }
    if options.setup:
        task["setup"] = "\n".join(options.setup)
    return GroupPlan(
        token=request.token,
        provisioner=BACKEND,
        num_nodes=nodes,
        slots_per_node=slots,
        body={
            "launch_mode": options.launch_mode,
            "task": task,
            **({"network": network} if network else {}),
            **({"offer": offer.name} if offer is not None else {}),
            # Only if no machine stands, the run may move to another infrastructure.
            **({"may_move": True} if network and network != request.network else {}),
        },
    )


def node_name(token: Token, node: int) -> str:
    """Return the name of the machine's managed job or cluster."""
    return f"{token}-{node}"


def task_request(plan: GroupPlan, node: int, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the task of a machine: the planned task with name and environment."""
    public = {key: value for key, value in environment.items() if key not in SECRET_VARIABLES}
    secrets = {key: value for key, value in environment.items() if key in SECRET_VARIABLES}
    body = plan.body["task"]
    return {
        **body,
        "name": node_name(plan.token, node),
        "envs": {**body["envs"], **public},
        "secrets": secrets,
    }


def _agent_script(options: SkyPilotOptions, time_limit_s: int | None) -> str:
    """Return the script that runs the agent; the exit code RELEASED becomes success."""
    # A cluster that was launched twice runs its task twice; the second one exits at once.
    claim = ['mkdir "${TMPDIR:-/tmp}/spotfit-$SPOTFIT_TOKEN-$SPOTFIT_NODE" || exit 0']
    # SkyPilot limits the idle time of a machine only. The exit code 124 is not recovered.
    timeout = () if time_limit_s is None else ("timeout", "--kill-after=60", str(time_limit_s))
    return "\n".join(
        (
            *(claim if options.launch_mode == "clusters" else ()),
            " ".join((*timeout, options.python, *AGENT_COMMAND[1:])),
            "code=$?",
            f'if [ "$code" = {int(AgentExitCode.RELEASED)} ]; then code=0; fi',
            'exit "$code"',
        )
    )


def _choose_network(request: GroupRequest, options: SkyPilotOptions) -> str:
    """Return the entry of `infra` for all machines of a group. Raises `ConfigError`.

    That of the machines that stand. Otherwise the first one that has not refused since the last
    round, or the one that refused first.
    """
    entries = options.infra
    if request.offer is not None:
        # The offer determines the network, also if other machines stand elsewhere.
        entries = (request.offer.network,) if request.offer.network else ()
    elif request.network:
        return request.network
    # SkyPilot opens ports between the machines of one VPC, which has one region, and "finds
    # available spot resources across regions and clouds" for each job:
    # https://docs.skypilot.co/en/v0.6.1/examples/managed-jobs.html
    wide = [one for one in entries if "/" not in one and one.lower() not in ONE_NETWORK]
    if wide or not entries:
        what = f"{wide[0]!r} has several regions" if wide else "it is not set"
        raise ConfigError(
            f"SkyPilotOptions(infra={options.infra!r}): {what}, and machines of two regions cannot "
            "connect to each other. This run needs more than one machine.",
            do="Set entries with a region, such as infra=('aws/us-east-1', 'gcp/us-central1'). A "
            "run uses one of them at a time.",
        )
    refused = request.refused_networks
    usable = [one for one in entries if one not in refused]
    return usable[0] if usable else min(entries, key=refused.index)


def _resources(
    request: GroupRequest, options: SkyPilotOptions, *, infra: Sequence[str]
) -> dict[str, Any]:
    """Return the resources; several candidates become an ordered or unordered list."""
    common = dict(_common_resources(request, options))
    use_spot: tuple[bool, ...] = {
        "only": (True,),
        "preferred": (True, False),
        "never": (False,),
    }[options.spot]
    if request.offer is not None:
        use_spot = (request.offer.market is Market.SPOT,)
    # Every infrastructure with spot machines, before any with on-demand machines.
    candidates: list[dict[str, Any]] = [
        {"use_spot": spot} | ({"infra": entry} if entry else {})
        for spot in use_spot
        for entry in infra or ("",)
    ]
    if len(candidates) == 1:
        return {**common, **candidates[0]}
    return {**common, "ordered" if options.infra_order == "given" else "any_of": candidates}


def _common_resources(request: GroupRequest, options: SkyPilotOptions) -> Iterator[tuple[str, Any]]:
    slots, per_worker = options.workers_per_node, request.resources_per_worker
    gpus = hardware.count_gpus(per_worker, slots)
    if gpus and not (options.accelerator or options.instance_type):
        raise ConfigError(
            f"The workers of a machine need {gpus} GPUs, but no GPU type is set in "
            "SkyPilotOptions.",
            do="Set SkyPilotOptions(accelerator='L4'), or an instance_type with GPUs; "
            "`sky show-gpus` lists GPU types.",
        )
    if options.instance_type:
        yield "instance_type", options.instance_type
    else:
        # '+' is "at least": an exact number would exclude most instance types. SkyPilot may start a
        # pod of Kubernetes with exactly this size.
        share = hardware.KUBERNETES_GPU_SHARE
        yield "cpus", f"{hardware.count_cpus(per_worker, slots, share=share)}+"
        memory_mib = hardware.required_memory_mib(per_worker, slots, per_cpu_gib=0.0, share=share)
        if memory_mib:
            yield "memory", f"{math.ceil(memory_mib / 1024)}+"
    if gpus and options.accelerator:
        yield "accelerators", f"{options.accelerator}:{gpus}"
    if options.image:
        yield "image_id", options.image
    if options.disk_gib:
        yield "disk_size", options.disk_gib
    labels = allocation_labels(
        "spotfit-",
        run=request.run_name,
        run_id=request.run_id,
        user=options.user,
        project=options.cost_project,
    )
    yield "labels", {**options.labels, **labels}
    if options.launch_mode == "jobs":
        # After a lost machine and after a drained agent, but not after errors.
        rules = {"max_restarts_on_errors": 0, "recover_on_exit_codes": [int(AgentExitCode.DRAINED)]}
        strategy = {"strategy": options.recovery_strategy} if options.recovery_strategy else {}
        yield "job_recovery", {**strategy, **rules}

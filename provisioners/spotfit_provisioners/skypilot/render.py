"""Our request as a task of SkyPilot: pure, and pinned by golden files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.model.group import GroupPlan, GroupRequest
from spotfit.provision.launch import COMMAND, Exit
from spotfit.provision.sizing import nodes_for
from spotfit_provisioners.kit import hardware
from spotfit_provisioners.skypilot.options import SkyPilotOptions

BACKEND = "skypilot"
MAX_NODES = 500
"""A managed job each: more want more than one jobs controller."""
SECRET = ("SPOTFIT_RUN_SECRET", "SPOTFIT_STORAGE_KEYS")
"""SkyPilot shows what is declared a secret to nobody but the task."""
ENDPOINT = "SKYPILOT_API_SERVER_ENDPOINT"
NO_LOCAL_SERVER = "SKYPILOT_DISABLE_LOCAL_API_SERVER"


def plan(request: GroupRequest, options: SkyPilotOptions) -> GroupPlan:
    """The task that each machine runs, but for its name and the environment of its agent."""
    hardware.check(request.resources_per_worker, backend="SkyPilot")
    slots = options.workers_per_node
    nodes = nodes_for(request, slots=slots, max_nodes=MAX_NODES, backend="SkyPilot")
    task: dict[str, Any] = {
        "num_nodes": 1,
        "run": _script(options),
        "envs": {
            NO_LOCAL_SERVER: "1",  # it would know nothing of our machines, and rent them again
            **({ENDPOINT: options.endpoint} if options.endpoint else {}),
            **options.environment,
        },
        "resources": _resources(request, options),
    }
    if options.setup:
        task["setup"] = "\n".join(options.setup)
    return GroupPlan(request.token, BACKEND, nodes, slots, {"via": options.via, "task": task})


def name(token: Token, node: int) -> str:
    """Of a machine's job or cluster."""
    return f"{token}-{node}"


def task(plan: GroupPlan, node: int, environment: Mapping[str, str]) -> dict[str, Any]:
    """What is launched for that machine: the plan's task, and what its agent is told."""
    told = {key: value for key, value in environment.items() if key not in SECRET}
    secrets = {key: value for key, value in environment.items() if key in SECRET}
    body = plan.body["task"]
    return {
        **body,
        "name": name(plan.token, node),
        "envs": {**body["envs"], **told},
        "secrets": secrets,
    }


def _script(options: SkyPilotOptions) -> str:
    """An agent that is not wanted any more has done what it should: that is no failure.

    A cluster that was launched twice runs its task twice: the second finds that the first is there.
    """
    claim = ['mkdir "${TMPDIR:-/tmp}/spotfit-$SPOTFIT_TOKEN-$SPOTFIT_NODE" || exit 0']
    return "\n".join(
        (
            *(claim if options.via == "clusters" else ()),
            " ".join((options.python, *COMMAND[1:])),
            "code=$?",
            f'if [ "$code" = {int(Exit.GIVEN_UP)} ]; then code=0; fi',
            'exit "$code"',
        )
    )


def _resources(request: GroupRequest, options: SkyPilotOptions) -> dict[str, Any]:
    """Common to all candidates, and the candidates where there are several."""
    common = dict(_common(request, options))
    candidates = list(_candidates(options))
    if len(candidates) == 1:
        return {**common, **candidates[0]}
    return {**common, "ordered" if options.order == "given" else "any_of": candidates}


def _candidates(options: SkyPilotOptions) -> Iterator[dict[str, Any]]:
    """Each place with spot machines, then each with others."""
    kinds = {"only": (True,), "preferred": (True, False), "never": (False,)}[options.spot]
    for spot in kinds:
        for infra in options.infra or ("",):
            yield {"use_spot": spot} | ({"infra": infra} if infra else {})


def _common(request: GroupRequest, options: SkyPilotOptions) -> Iterator[tuple[str, Any]]:
    slots, per_worker = options.workers_per_node, request.resources_per_worker
    gpus = hardware.gpus(per_worker, slots)
    if gpus and not (options.accelerator or options.instance_type):
        raise ConfigError(
            f"Workers want {gpus} GPUs on each machine, and nothing says of which kind.",
            do="Set SkyPilotOptions(accelerator='L4'), or an instance_type that has them; "
            "`sky show-gpus` lists the kinds.",
        )
    if options.instance_type:
        yield "instance_type", options.instance_type
    else:
        yield "cpus", f"{hardware.cpus(per_worker, slots)}+"
        if "memory" in per_worker:
            gib = hardware.memory_mib(per_worker, slots, per_cpu_gib=0.0) / 1024
            yield "memory", f"{math.ceil(gib)}+"
    if gpus and options.accelerator:
        yield "accelerators", f"{options.accelerator}:{gpus}"
    if options.image:
        yield "image_id", options.image
    if options.disk_gib:
        yield "disk_size", options.disk_gib
    if options.labels:
        yield "labels", dict(options.labels)
    if options.via == "jobs":
        yield "job_recovery", _recovery(options)


def _recovery(options: SkyPilotOptions) -> dict[str, Any]:
    """After a loss, and after our own code for a machine that left because it was being lost."""
    told: dict[str, Any] = {
        "max_restarts_on_errors": 0,
        "recover_on_exit_codes": [int(Exit.DRAINED)],
    }
    return {"strategy": options.recovery, **told} if options.recovery else told

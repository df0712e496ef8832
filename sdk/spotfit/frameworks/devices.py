"""Assignment of a node's accelerators to its workers, and the variables that make them visible.

A worker's own devices follow from its local rank. It may see more devices than its own (NCCL needs
both GPUs of a pair visible for peer-to-peer copies), and it numbers those that it sees from zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from spotfit.core.errors import ConfigError
from spotfit.model.spec import RunSpec
from spotfit.protocol.worker_agent import StartWorker

TPU = "tpu"
"""Device name of a TPU. It has no number: a process has one TPU, which its runtime selects."""
CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
# The resource that users request, and the variable of the Neuron runtime that limits a process.
_NEURON = ("neuron_cores", "NEURON_RT_VISIBLE_CORES")
_spec_decoder: msgspec.json.Decoder[RunSpec | None] = msgspec.json.Decoder(RunSpec | None)


def worker_devices(start: StartWorker, *, sees_peer_devices: bool) -> tuple[str, ...]:
    """Return the devices of this worker, such as "cuda:0", as numbered in its own process.

    Derived from the node's devices and the request in `start`, the worker's first message; no
    device is opened. A request of less than one GPU yields one shared device, a request of none
    yields (), and of a TPU ("tpu",). With `sees_peer_devices` the worker also sees the devices of
    the other workers on its node, and its own GPUs are numbered among them.
    """
    if _requested(start, "TPU"):
        return (TPU,)
    assigned = _assigned_devices(start)
    # No variable limits what other accelerators a process sees: they keep the node's numbers.
    if not _are_gpus(assigned):
        return assigned
    visible = _visible_devices(start, sees_peer_devices=sees_peer_devices)
    return tuple(f"cuda:{visible.index(gpu)}" for gpu in assigned)


def visible_device_variables(
    start: StartWorker, node_visible_devices: str | None, *, sees_peer_devices: bool
) -> dict[str, str]:
    """Return the variables that limit a worker to the devices that `worker_devices` numbers.

    CUDA_VISIBLE_DEVICES for GPUs, NEURON_RT_VISIBLE_CORES for NeuronCores; {} for other devices.
    `node_visible_devices` is CUDA_VISIBLE_DEVICES of the node's agent, or None if it is unset. Sets
    nothing. Raises `ConfigError` if that variable hides a GPU of the worker.
    """
    variables = {}
    if start.devices and _are_gpus(start.devices):
        variables = cuda_visible_devices(
            _visible_devices(start, sees_peer_devices=sees_peer_devices), node_visible_devices
        )
    resource, variable = _NEURON
    if cores := int(_requested(start, resource)):
        first = start.local_rank * cores
        variables[variable] = ",".join(str(first + n) for n in range(cores))
    return variables


def cuda_visible_devices(gpus: Sequence[str], node_visible_devices: str | None) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES for a process that must see exactly these GPUs of its node.

    `gpus` are the node's names, such as "cuda:1". The result is a dictionary of this one variable,
    and nothing is set. Raises `ConfigError` if `node_visible_devices`, the value for the node's
    agent (None if it is unset), hides one.
    """
    numbers = [int(gpu.removeprefix("cuda:")) for gpu in gpus]
    if node_visible_devices is None:
        return {CUDA_VISIBLE_DEVICES: ",".join(map(str, numbers))}
    # The variable of a child process uses the driver's numbering or UUIDs, not the numbers that
    # the parent sees: each GPU is mapped to the entry of the parent's own variable.
    entries = [entry.strip() for entry in node_visible_devices.split(",")]
    for gpu, number in zip(gpus, numbers, strict=True):
        if number >= len(entries) or not entries[number]:
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES={node_visible_devices} hides {gpu}, which the node offers "
                "to its workers.",
                do="Unset CUDA_VISIBLE_DEVICES on the machines; spotfit sets it for each worker.",
            )
    return {CUDA_VISIBLE_DEVICES: ",".join(entries[number] for number in numbers)}


def require_enough_devices(start: StartWorker) -> None:
    """Raise `ConfigError` if the node has too few GPUs for this worker's request.

    Called in the worker, for a clear error before a library looks for the GPU.
    """
    if len(_assigned_devices(start)) >= _gpus_per_worker(start):
        return
    raise ConfigError(
        f"Worker of rank {start.rank} (local rank {start.local_rank}) requests "
        f"{_requested(start, 'GPU'):g} GPU, but its node has {', '.join(start.devices) or 'none'}.",
        do="Use machines with enough GPUs for resources_per_worker. If the GPUs exist, check that "
        "nvidia-smi lists them, or name them in SPOTFIT_DEVICES.",
    )


def _assigned_devices(start: StartWorker) -> tuple[str, ...]:
    """Return this worker's devices under the names that its node gives them."""
    each = _gpus_per_worker(start)
    if _requested(start, "GPU") >= 1 or not start.devices:
        return start.devices[start.local_rank * each :][:each]
    # Fractional GPUs are shared round-robin, so that workers spread over all of the node's GPUs.
    return (start.devices[start.local_rank % len(start.devices)],)[:each]


def _visible_devices(start: StartWorker, *, sees_peer_devices: bool) -> tuple[str, ...]:
    # Only the GPUs of this run's workers: others on the node may belong to another run.
    if sees_peer_devices or start.share_devices:
        return start.devices[: start.local_world_size * _gpus_per_worker(start)]
    return _assigned_devices(start)


def _gpus_per_worker(start: StartWorker) -> int:
    """Return the number of GPUs a worker uses; a fraction of a GPU counts as one shared GPU."""
    requested = _requested(start, "GPU")
    return int(requested) or math.ceil(requested)


def _requested(start: StartWorker, resource: str) -> float:
    spec = _spec_decoder.decode(start.spec)
    return spec.resources_per_worker.get(resource, 0) if spec else 0


def _are_gpus(devices: Sequence[str]) -> bool:
    return all(name.startswith("cuda:") for name in devices)

"""Which of its node's accelerators are a worker's own, which it may see, and as what."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from spotfit.core.errors import ConfigError
from spotfit.model.spec import RunSpec
from spotfit.model.wire import Start

TPU = "tpu"
"""A process has one, and its runtime knows which."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
_NEURON = ("neuron_cores", "NEURON_RT_VISIBLE_CORES")
_specs: msgspec.json.Decoder[RunSpec | None] = msgspec.json.Decoder(RunSpec | None)


def own_devices(start: Start, *, beside_peers: bool) -> tuple[str, ...]:
    """The devices this worker may use, as it numbers those it sees.

    As many as it asked for; one, shared, for less than one; none where it asked for none, whatever
    its node has. With `beside_peers` it sees those of its node's other workers, too.
    """
    if _wanted(start, "TPU"):
        return (TPU,)
    own = _own(start)
    if not _are_cards(own):
        return own
    seen = _seen(start, beside_peers=beside_peers)
    return tuple(f"cuda:{seen.index(card)}" for card in own)


def visibility(start: Start, told: str | None, *, beside_peers: bool) -> dict[str, str]:
    """The variables that show a worker what `own_devices` counts, and nothing else.

    `told` is what its node's agent was told in CUDA_VISIBLE_DEVICES.
    """
    variables = {}
    if start.devices and _are_cards(start.devices):
        variables = shown(_seen(start, beside_peers=beside_peers), told)
    resource, variable = _NEURON
    if cores := int(_wanted(start, resource)):
        first = start.local_rank * cores
        variables[variable] = ",".join(str(first + n) for n in range(cores))
    return variables


def shown(cards: Sequence[str], told: str | None) -> dict[str, str]:
    """The variable that shows a process these cards of its node, and no others."""
    return {VISIBLE: ",".join(_as_the_driver_says(card, told) for card in cards)}


def refuse_too_few(start: Start) -> None:
    """Raise `ConfigError` where the node has fewer devices than its workers asked for."""
    if len(_own(start)) >= _each(start):
        return
    raise ConfigError(
        f"The worker of rank {start.rank}, number {start.local_rank} of its node, asked for "
        f"{_wanted(start, 'GPU'):g} GPU; its node has {', '.join(start.devices) or 'none'}.",
        do="Ask for machines with as many GPUs as their workers need; if there are, nvidia-smi "
        "should list them, and SPOTFIT_DEVICES can name them.",
    )


def _own(start: Start) -> tuple[str, ...]:
    """As its node calls them."""
    each = _each(start)
    if _wanted(start, "GPU") >= 1 or not start.devices:
        return start.devices[start.local_rank * each :][:each]
    return (start.devices[start.local_rank % len(start.devices)],)[:each]


def _seen(start: Start, *, beside_peers: bool) -> tuple[str, ...]:
    if beside_peers or start.share_devices:
        return start.devices[: start.local_world_size * _each(start)]
    return _own(start)


def _each(start: Start) -> int:
    """How many GPUs a worker uses; less than one is one that it shares."""
    wanted = _wanted(start, "GPU")
    return int(wanted) or math.ceil(wanted)


def _wanted(start: Start, resource: str) -> float:
    spec = _specs.decode(start.spec)
    return spec.resources_per_worker.get(resource, 0) if spec else 0


def _are_cards(devices: Sequence[str]) -> bool:
    return all(name.startswith("cuda:") for name in devices)


def _as_the_driver_says(card: str, told: str | None) -> str:
    number = int(card.removeprefix("cuda:"))
    if told is None:
        return str(number)
    entries = [entry.strip() for entry in told.split(",")]
    if number < len(entries) and entries[number]:
        return entries[number]
    raise ConfigError(
        f"CUDA_VISIBLE_DEVICES={told} shows no {card}, which this worker's node offers.",
        do="Leave the variable to us: every worker is shown what it asked for.",
    )

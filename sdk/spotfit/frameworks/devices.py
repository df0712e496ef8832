"""Which of its node's accelerators are a worker's own."""

from __future__ import annotations

import msgspec

from spotfit.model.spec import RunSpec
from spotfit.model.wire import Start

_specs: msgspec.json.Decoder[RunSpec | None] = msgspec.json.Decoder(RunSpec | None)


def own_devices(start: Start) -> tuple[str, ...]:
    """The devices this worker may use: as many as it asked for; one, shared, for less than one.

    Nothing where it asked for none, whatever its node has.
    """
    spec = _specs.decode(start.spec)
    wanted = spec.resources_per_worker.get("GPU", 0) if spec else 0
    if wanted <= 0 or not start.devices:
        return ()
    if wanted < 1:
        return (start.devices[start.local_rank % len(start.devices)],)
    first = start.local_rank * int(wanted)
    return start.devices[first : first + int(wanted)]

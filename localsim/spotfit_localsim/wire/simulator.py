"""One simulated cloud as a process: `python -m spotfit_localsim.wire.simulator <root>`.

Its directory says what it is (`options.json`), where it answers (`address`), and what it remembers
(`memory.json`, `machines/`). Killed and started anew it goes on where it stood, at the same port.
Besides the cloud's own API it answers at `/-/…`: that is how tests and people take its machines
away.
"""

from __future__ import annotations

import contextlib
import importlib
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from spotfit.core.codec import encode
from spotfit.core.errors import ConfigError, SpotfitError
from spotfit.host import clocks, log
from spotfit.host.process import call_myself
from spotfit_localsim.wire.api import WireCloud
from spotfit_localsim.wire.http import Reply, Request, Server
from spotfit_localsim.wire.options import CLOUDS, SimOptions
from spotfit_localsim.wire.site import Hooks, Machine, Site, write
from spotfit_localsim.wire.tide import Tide
from spotfit_localsim.wire.trouble import Troubles

OURS = "/-/"
_TICK_S = 0.02


def load_cloud(name: str) -> Any:
    """The class of that simulated cloud."""
    module, _, kind = CLOUDS[name].partition(":")
    return getattr(importlib.import_module(module), kind)


class Simulator:
    """A cloud, its site and its doors, under one lock."""

    def __init__(self, root: Path, options: SimOptions) -> None:
        self.root = root
        self.options = options
        self.leave = threading.Event()
        self._lock = threading.RLock()
        self._metadata: dict[int, Server] = {}
        self._asked_at = _now()
        self._asked: Counter[str] = Counter()
        self.tide = Tide(options, began_s=self._began_s())
        self.site = Site.open(root, self.tide)
        self.troubles = Troubles()
        kind = load_cloud(options.cloud)
        self.cloud: WireCloud = kind(self.site, self.troubles)
        self.site.hooks = Hooks(self._environment, self._open_metadata, self._close_metadata)
        self._remember(kind)
        for machine in self.site.standing():
            if machine.metadata_port:
                self._open_metadata(machine)
        self.server = Server(self._answer, port=self._last_port(), lock=self._lock)
        write(root / "address", self.server.url.encode())

    # --- life --------------------------------------------------------------------------------

    def run(self) -> None:
        """Until it is told to leave, or nothing has happened for long."""
        while not self.leave.wait(_TICK_S):
            with self._lock:
                self.site.tick()
                self.cloud.tick()
                self._keep()
                idle = not any(self.site.standing())
                if idle and _now() - self._asked_at > self.options.idle_s:
                    self._remove()
                    return

    def close(self) -> None:
        """Answer nobody any more. Machines live on, as those of a real cloud would."""
        with self._lock:  # whoever is being answered gets the whole answer
            pass
        self.server.close()
        for door in self._metadata.values():
            door.close()

    def _remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def _began_s(self) -> float:
        path = self.root / "began"
        if not path.exists():
            write(path, str(clocks.wall_ms() / 1000).encode())
        return float(path.read_text())

    def _last_port(self) -> int:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int((self.root / "address").read_text().rpartition(":")[2])
        return 0

    def _remember(self, kind: Any) -> None:
        with contextlib.suppress(FileNotFoundError):
            body = (self.root / "memory.json").read_bytes()
            self.cloud.memory = msgspec.json.decode(body, type=kind.Memory)
        self._kept = encode(self.cloud.memory)

    def _keep(self) -> None:
        body = encode(self.cloud.memory)
        if body != self._kept:
            write(self.root / "memory.json", body)
            self._kept = body

    # --- machines ----------------------------------------------------------------------------

    def _environment(self, machine: Machine) -> Mapping[str, str]:
        return {**self.cloud.access(self.server.url).environment, **self.cloud.environment(machine)}

    def _open_metadata(self, machine: Machine) -> int:
        def answer(request: Request) -> Reply:
            return self.cloud.metadata(machine, request) or Reply(404)

        host, port = self.site.host(machine), machine.metadata_port
        door = Server(answer, host=host, port=port, lock=self._lock)
        self._metadata[machine.number] = door
        return door.port

    def _close_metadata(self, machine: Machine) -> None:
        door = self._metadata.pop(machine.number, None)
        if door is not None:
            threading.Thread(target=door.close).start()  # it may be waiting for our lock

    # --- requests ----------------------------------------------------------------------------

    def _answer(self, request: Request) -> Reply:
        self._asked_at = _now()
        if request.path.startswith(OURS):
            return self._answer_ours(request)
        self._asked[request.method] += 1
        if self.troubles.strikes("unavailable"):
            return Reply(503)
        reply = self.cloud.answer(request)
        self._keep()
        return reply

    def _answer_ours(self, request: Request) -> Reply:
        try:
            return Reply.json(self._do(request.path.removeprefix(OURS), request.json()))
        except (KeyError, SpotfitError, msgspec.DecodeError) as wrong:
            return Reply.json({"error": str(wrong)}, 400)

    def _do(self, what: str, told: Mapping[str, Any]) -> Any:
        if what == "machines":
            return [asdict_of(machine) for machine in self.site.machines.values()]
        if what == "reclaim":
            return self._reclaim(told.get("machine"), notice=bool(told.get("notice", False)))
        if what in ("advise", "silence"):
            struck = self._youngest(told.get("machine"))
            (self.site.advise if what == "advise" else self.site.silence)(struck)
            return asdict_of(struck)
        if what == "capacity":
            self.tide.limit = told["machines"]
            return {}
        if what == "trouble":
            self.troubles.expect(told["kind"], int(told.get("times", 1)))
            return {}
        if what == "forbid":
            self.troubles.forbid(told["rights"])
            return {}
        if what == "leave":
            if told.get("machines", True):
                self.site.close()
            self.leave.set()
            return {}
        if what == "asked":
            return dict(self._asked)
        if what == "alive":
            return {"cloud": self.options.cloud, "options": asdict(self.options)}
        raise ConfigError(f"Nothing is done at {OURS}{what}.")

    def _reclaim(self, number: int | None, *, notice: bool) -> Any:
        struck = self._youngest(number)
        self.site.reclaim(struck, notice=notice)
        return asdict_of(struck)

    def _youngest(self, number: int | None) -> Machine:
        """The machine with that number, or the youngest of all, if it is up."""
        up = [machine for machine in self.site.standing() if machine.state == "up"]
        found = [machine for machine in up if number in (None, machine.number)]
        if not found:
            raise ConfigError(f"No machine {number or ''} is up.")
        return found[-1]


def asdict_of(machine: Machine) -> dict[str, Any]:
    """What may be told of a machine: not what its task was given."""
    told = msgspec.to_builtins(machine)
    kept = {name: told[name] for name in told if name not in ("environment", "command")}
    return {**kept, "address": Site.host(machine)}


def _now() -> float:
    return clocks.SystemClock().now()


@contextlib.contextmanager
def serving(root: Path, options: SimOptions) -> Iterator[Simulator]:
    """A simulator in this process, for a test that wants to look inside."""
    root.mkdir(parents=True, exist_ok=True)
    simulator = Simulator(root, options)
    thread = threading.Thread(target=simulator.run)
    thread.start()
    try:
        yield simulator
    finally:
        simulator.leave.set()
        thread.join()
        simulator.site.close()
        simulator.close()


def main(arguments: Sequence[str]) -> int:
    """Be the cloud of that directory until nobody needs it."""
    call_myself("spotfit-sim")
    root = Path(arguments[0])
    options = msgspec.json.decode((root / "options.json").read_bytes(), type=SimOptions)
    simulator = Simulator(root, options)
    signal.signal(signal.SIGTERM, lambda *_: simulator.leave.set())
    log.info("sim.up", cloud=options.cloud, at=simulator.server.url)
    try:
        simulator.run()
    finally:
        simulator.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The process of one simulated cloud: `python -m spotfit_localsim.clouds.simulator <root>`.

Files below the root directory:

    options.json   the options of the cloud
    address        the URL of the server
    started_at     the time of the first start, the origin of the capacity trace
    state.json     the state of the cloud
    machines/      one directory for each machine

A restarted simulator continues from these files at the same port. Besides the cloud's own API it
serves `/-/<action>`, by which tests preempt machines and inject faults.
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
from spotfit.host import log, system
from spotfit.host.process import set_process_name
from spotfit.model.offer import Market
from spotfit_localsim.clouds.api import SimulatedCloud
from spotfit_localsim.clouds.capacity import RealTimeMarket
from spotfit_localsim.clouds.cloud_host import (
    Datacenter,
    MachineHooks,
    SimulatedMachine,
    write_atomically,
)
from spotfit_localsim.clouds.firewall import BlackHole, machine_environment
from spotfit_localsim.clouds.http_server import (
    MalformedRequestError,
    WireRequest,
    WireResponse,
    WireServer,
)
from spotfit_localsim.clouds.injected_errors import ApiFaults
from spotfit_localsim.clouds.options import CLOUDS, SimOptions

CONTROL_PREFIX = "/-/"
# Short against the boot and notice times of tests.
_TICK_S = 0.02


def load_cloud(name: str) -> Any:
    """Import and return the class of a simulated cloud."""
    module, _, kind = CLOUDS[name].partition(":")
    return getattr(importlib.import_module(module), kind)


class Simulator:
    """A cloud, its datacenter and its HTTP servers, under one lock."""

    def __init__(self, root: Path, options: SimOptions) -> None:
        self.root = root
        self.options = options
        self.stop_event = threading.Event()
        self._metadata_servers: dict[int, WireServer] = {}
        self._last_request_at = _now()
        self._request_counts: Counter[str] = Counter()
        # Kept on disk: a restarted simulator continues the capacity trace where it was.
        started_at = root / "started_at"
        if not started_at.exists():
            write_atomically(started_at, str(system.wall_ms() / 1000).encode())
        self.market = RealTimeMarket(options, started_s=float(started_at.read_text()))
        self.datacenter = Datacenter.open(root, self.market)
        self.datacenter.sets_region = options.sets_region
        self._black_hole = BlackHole() if options.firewall else None
        self._lock = self.datacenter.lock
        self.faults = ApiFaults()
        kind = load_cloud(options.cloud)
        self.cloud: SimulatedCloud = kind(self.datacenter, self.faults)
        self.datacenter.hooks = MachineHooks(
            self._task_environment, self._open_metadata, self._close_metadata
        )
        with contextlib.suppress(FileNotFoundError):
            body = (root / "state.json").read_bytes()
            self.cloud.state = msgspec.json.decode(body, type=kind.State)
        self._saved_state = encode(self.cloud.state)
        self._past_states = [(_now(), self._saved_state)]
        """The last encoded states, each with the time of its change, for reads that lag."""
        for machine in self.datacenter.active_machines():
            # Their tasks still use the metadata service of the earlier process.
            if machine.metadata_port:
                self._open_metadata(machine)
        # The port of an earlier simulator process, which agents and clients still use.
        port = 0
        with contextlib.suppress(FileNotFoundError, ValueError):
            port = int((root / "address").read_text().rpartition(":")[2])
        self.server = WireServer(self._answer_request, port=port, lock=self._lock)
        # Last: clients connect as soon as the file exists.
        write_atomically(root / "address", self.server.url.encode())

    # --- main loop ---------------------------------------------------------------------------

    def run(self) -> None:
        """Run until `stop_event` is set, or there was no machine and no request for `idle_s`."""
        while not self.stop_event.wait(_TICK_S):
            with self._lock:
                self.datacenter.tick()
                self.cloud.tick()
                self._save_state()
                idle = not any(self.datacenter.active_machines())
                if idle and _now() - self._last_request_at > self.options.idle_s:
                    shutil.rmtree(self.root, ignore_errors=True)
                    return

    def close(self) -> None:
        """Stop the servers. Machines keep running, as those of a real cloud would."""
        with self._lock:  # wait for a request that is being answered
            pass
        self.server.close()
        for server in self._metadata_servers.values():
            server.close()
        if self._black_hole is not None:
            self._black_hole.close()

    def _save_state(self) -> None:
        body = encode(self.cloud.state)
        # Most ticks change nothing, and a write costs more than an encoding.
        if body != self._saved_state:
            write_atomically(self.root / "state.json", body)
            self._saved_state = body
            if self.options.lag_s:
                self._past_states.append((_now(), body))

    # --- machines ----------------------------------------------------------------------------

    def _task_environment(self, machine: SimulatedMachine) -> Mapping[str, str]:
        return {
            **self.cloud.client_access(self.server.url).environment,
            **self.cloud.task_environment(machine),
            **self._firewall_environment(machine),
        }

    def _firewall_environment(self, machine: SimulatedMachine) -> Mapping[str, str]:
        if self._black_hole is None:
            return {}
        own = self.datacenter.host(machine)
        return machine_environment(self.options.firewall, self._black_hole, own)

    def _open_metadata(self, machine: SimulatedMachine) -> int:
        def answer(request: WireRequest) -> WireResponse:
            return self.cloud.answer_metadata(machine, request) or WireResponse(404)

        host, port = self.datacenter.host(machine), machine.metadata_port
        server = WireServer(answer, host=host, port=port, lock=self._lock)
        self._metadata_servers[machine.number] = server
        return server.port

    def _close_metadata(self, machine: SimulatedMachine) -> None:
        metadata_server = self._metadata_servers.pop(machine.number, None)
        if metadata_server is not None:
            # In a thread: close() waits for a request that may wait for the lock held here.
            threading.Thread(target=metadata_server.close).start()

    # --- requests ----------------------------------------------------------------------------

    def _answer_request(self, request: WireRequest) -> WireResponse:
        self._last_request_at = _now()
        if request.path.startswith(CONTROL_PREFIX):
            action = request.path.removeprefix(CONTROL_PREFIX)
            try:
                return WireResponse.json(self._run_control_action(action, request.json()))
            except (KeyError, SpotfitError, MalformedRequestError) as wrong:
                return WireResponse.json({"error": str(wrong)}, 400)
        self._request_counts[request.method] += 1
        # Neither counted by the cloud nor executed: the request did not reach it.
        if self.faults.take("unavailable"):
            return WireResponse(503)
        try:
            if self.options.lag_s and self.cloud.is_lagging_read(request):
                return self._answer_from_past(request)
            reply = self.cloud.answer_request(request)
        # A defect of the simulator, or input that it does not check: clients get an answer, and
        # the simulator keeps serving.
        except Exception as error:  # noqa: BLE001
            log.error("simulator.request_failed", error=error, path=request.path)
            return WireResponse.json({"message": "internal error of the simulator"}, 500)
        self._save_state()
        return reply

    def _answer_from_past(self, request: WireRequest) -> WireResponse:
        """Answer a read from the state `lag_s` ago, or from that at the start."""
        seen_until = _now() - self.options.lag_s
        while len(self._past_states) > 1 and self._past_states[1][0] <= seen_until:
            del self._past_states[0]
        present = self.cloud.state
        self.cloud.state = msgspec.json.decode(self._past_states[0][1], type=type(present))
        try:
            return self.cloud.answer_request(request)
        finally:
            self.cloud.state = present

    def _run_control_action(self, action: str, arguments: Mapping[str, Any]) -> Any:
        if action == "machines":
            return [machine_summary(one) for one in self.datacenter.machines.values()]
        if action == "reclaim":
            machine = self._find_running_machine(arguments.get("machine"), market=Market.SPOT)
            self.datacenter.reclaim(machine, notice=bool(arguments.get("notice", False)))
            return machine_summary(machine)
        if action in ("advise", "silence"):
            machine = self._find_running_machine(arguments.get("machine"))
            (self.datacenter.advise if action == "advise" else self.datacenter.silence)(machine)
            return machine_summary(machine)
        if action == "capacity":
            if arguments.get("market", Market.SPOT) == Market.ON_DEMAND:
                self.market.max_on_demand_machines = arguments["machines"]
            else:
                self.market.max_machines = arguments["machines"]
            return {}
        if action == "trouble":
            duration_s = float(arguments.get("duration_s", 0.0))
            times = int(arguments.get("times", 0 if duration_s else 1))
            self.faults.inject(arguments["kind"], times, duration_s=duration_s)
            return {}
        if action == "forbid":
            self.faults.deny_permissions(arguments["rights"])
            return {}
        if action == "leave":
            if arguments.get("machines", True):
                self.datacenter.close()
            self.stop_event.set()
            return {}
        if action == "asked":
            return dict(self._request_counts)
        if action == "alive":
            return {"cloud": self.options.cloud, "options": asdict(self.options)}
        raise ConfigError(f"Unknown control action {CONTROL_PREFIX}{action}.")

    def _find_running_machine(
        self, number: int | None, *, market: Market | None = None
    ) -> SimulatedMachine:
        """Return the running machine with that number, or the youngest one (of `market`) for
        None."""
        running = [
            machine for machine in self.datacenter.active_machines() if machine.state == "up"
        ]
        candidates = [
            machine
            for machine in running
            if (number is None and market in (None, machine.market)) or number == machine.number
        ]
        if not candidates:
            raise ConfigError(f"No machine {number or ''} is running.")
        # The youngest: a test that preempts repeatedly hits the replacement.
        return candidates[-1]


def machine_summary(machine: SimulatedMachine) -> dict[str, Any]:
    """Return the public fields of a machine, without its environment and command (secrets)."""
    fields = msgspec.to_builtins(machine)
    public_fields = {
        name: fields[name] for name in fields if name not in ("environment", "command")
    }
    return {**public_fields, "address": Datacenter.host(machine)}


def _now() -> float:
    return system.SystemClock().now()


@contextlib.contextmanager
def running_simulator(root: Path, options: SimOptions) -> Iterator[Simulator]:
    """Run a simulator in a thread of this process, for tests that inspect its state."""
    root.mkdir(parents=True, exist_ok=True)
    simulator = Simulator(root, options)
    thread = threading.Thread(target=simulator.run)
    thread.start()
    try:
        yield simulator
    finally:
        simulator.stop_event.set()
        thread.join()
        simulator.datacenter.close()
        simulator.close()


def main(arguments: Sequence[str]) -> int:
    """Run the simulator of that directory until it is idle or receives SIGTERM."""
    set_process_name("spotfit-sim")
    root = Path(arguments[0])
    options = msgspec.json.decode((root / "options.json").read_bytes(), type=SimOptions)
    simulator = Simulator(root, options)
    signal.signal(signal.SIGTERM, lambda *_: simulator.stop_event.set())
    log.info("simulator.started", cloud=options.cloud, at=simulator.server.url)
    try:
        simulator.run()
    finally:
        simulator.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

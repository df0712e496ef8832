"""A driver with a fake cloud, a scripted clock, and agents whose entries the test writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.client import request
from spotfit.client import run_handle as handles
from spotfit.client.keyring import open_authenticated
from spotfit.client.request import FitRequest
from spotfit.client.run_config import RunConfig
from spotfit.client.run_handle import RunHandle, attach
from spotfit.core.ids import RunId
from spotfit.frameworks.backend_config import BackendConfig
from spotfit.host import system
from spotfit.ledger import keys
from spotfit.ledger.journal import Ledger, decode_entry
from spotfit.model.config import ScalingConfig
from spotfit.model.events import FitEnded, GroupsReleased, JournalEvent, LeaderElected
from spotfit.model.view import View
from spotfit.store.factory import open_store
from spotfit.testing.builders import TOKEN, ManualClock, a_member, an_agent_id
from tests.unit.control.fake_provisioner import FakeProvisioner


class ScriptedClock(ManualClock):
    """A virtual clock that calls the next of `next_events` on every wait."""

    def __init__(self) -> None:
        super().__init__(100.0)
        self.next_events: Iterator[Callable[[], object]] = iter(())

    def wait(self, seconds: float) -> None:
        super().wait(max(seconds, 0.01))
        event = next(self.next_events, None)
        if event is not None:
            event()


class ClientHarness:
    """The driver's environment: home directory, storage, clock and cloud."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cloud = FakeProvisioner(observe_interval_s=0.1)
        self.clock = ScriptedClock()
        self.url = f"{tmp_path}/results/digits"
        self.storage_path = f"{tmp_path}/results"
        monkeypatch.setenv("SPOTFIT_HOME", str(tmp_path / "home"))
        monkeypatch.setattr(system, "SystemClock", lambda: self.clock)
        for module in (request, handles):
            monkeypatch.setattr(module, "open_provisioner", lambda _name, _options: self.cloud)

    def request(self, fn: Any = None, config: Any = None, **fields: Any) -> FitRequest:
        run = RunConfig(name="digits", storage_path=self.storage_path)
        defaults: dict[str, Any] = {
            "scaling": ScalingConfig(num_workers=2),
            "run": run,
            "framework": "none",
            "framework_options": {},
            "backend_config": BackendConfig(),
        }
        return FitRequest(fn or train, config, **{**defaults, **fields})

    @property
    def agent_ledger(self) -> Ledger:
        """The run's ledger, as seen by an agent."""
        store = open_authenticated(open_store(self.url))
        ledger = Ledger(store, RunId(""), an_agent_id(0))
        view = ledger.catch_up()
        ledger.run_id = view.run_id or RunId("")
        return ledger

    @property
    def view(self) -> View:
        return self.agent_ledger.view

    def append_as_agent(self, *events: JournalEvent) -> None:
        """Append entries as an agent; retry if a supervisor thread was faster."""
        for event in events:
            while not self._append(event):
                continue

    def _append(self, event: JournalEvent) -> bool:
        ledger = self.agent_ledger
        slot = ledger.view.next_slot
        ledger.append(event, after=ledger.view)
        entry = decode_entry(ledger.store.get(keys.entry(slot)))
        return (entry.author, entry.event) == (ledger.agent_id, event)

    def end_run(self, ended: FitEnded) -> None:
        """Elect an agent, end the run and release its machines."""
        self.append_as_agent(
            LeaderElected(
                leader=an_agent_id(0), epoch=9, coordinator_address=a_member(0).coordinator_address
            ),
            ended,
        )
        tokens = [token for token, group in self.view.groups.items() if group.handle]
        self.append_as_agent(*(GroupsReleased(token=token) for token in tokens or [TOKEN]))

    def attach_run(self) -> RunHandle:
        return attach(self.url)


def train() -> int:
    """The training function."""
    return 7

"""The front door with all behind it on paper: a cloud, a clock, and agents that the test plays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.client import backend
from spotfit.client import handle as handles
from spotfit.client.config import RunConfig
from spotfit.client.handle import RunHandle, attach
from spotfit.client.request import FitRequest
from spotfit.core.codec import decoder
from spotfit.core.ids import RunId
from spotfit.frameworks.config import BackendConfig
from spotfit.host import clocks
from spotfit.ledger import keys
from spotfit.ledger.run import Ledger
from spotfit.model.config import ScalingConfig
from spotfit.model.events import Entry, Event, FitEnded, LeaderElected, Released
from spotfit.model.view import View
from spotfit.store.opening import open_store
from spotfit.testing.builders import TOKEN, a_member, an_agent
from spotfit.testing.clock import ManualClock
from tests.unit.control.paper import PaperCloud


class Days(ManualClock):
    """A clock on which, whenever somebody waits, the next thing happens."""

    def __init__(self) -> None:
        super().__init__(100.0)
        self.coming: Iterator[Callable[[], object]] = iter(())

    def wait(self, seconds: float) -> None:
        super().wait(max(seconds, 0.01))
        happens = next(self.coming, None)
        if happens is not None:
            happens()


class Door:
    """A user's machine, and what lies beyond it."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cloud = PaperCloud(observe_s=0.1)
        self.clock = Days()
        self.url = f"{tmp_path}/results/digits"
        self.storage = f"{tmp_path}/results"
        monkeypatch.setenv("SPOTFIT_HOME", str(tmp_path / "home"))
        monkeypatch.setattr(clocks, "SystemClock", lambda: self.clock)
        for module in (backend, handles):
            monkeypatch.setattr(module, "open_provisioner", lambda _name, _options: self.cloud)

    def request(self, fn: Any = None, config: Any = None, **given: Any) -> FitRequest:
        run = RunConfig(name="digits", storage_path=self.storage)
        usual: dict[str, Any] = {"scaling": ScalingConfig(num_workers=2), "run": run}
        rest: dict[str, Any] = {
            "framework": "none",
            "framework_options": {},
            "backend_config": BackendConfig(),
        }
        return FitRequest(fn or train, config, **{**rest, **usual, **given})

    @property
    def agent(self) -> Ledger:
        """The run as one of its agents."""
        store = open_store(self.url)
        ledger = Ledger(store, RunId(""), an_agent(0))
        view = ledger.catch_up()
        ledger.run_id = view.run_id or RunId("")
        return ledger

    @property
    def view(self) -> View:
        return self.agent.view

    def write(self, *events: Event) -> None:
        """As that agent; where a thread that minds the run was faster, once more."""
        for event in events:
            while not self._wrote(event):
                continue

    def _wrote(self, event: Event) -> bool:
        ledger = self.agent
        slot = ledger.view.next_slot
        ledger.append(event, after=ledger.view)
        entry = decoder(Entry).decode(ledger.store.get(keys.entry(slot)))
        return (entry.by, entry.event) == (ledger.me, event)

    def agents_end_it(self, ended: FitEnded) -> None:
        """An agent leads, and the run comes to its end."""
        self.write(LeaderElected(an_agent(0), 9, a_member(0).hub), ended)
        tokens = [token for token, group in self.view.groups.items() if group.handle]
        self.write(*(Released(token) for token in tokens or [TOKEN]))

    def attached(self) -> RunHandle:
        return attach(self.url)


def train() -> int:
    """What is fitted."""
    return 7

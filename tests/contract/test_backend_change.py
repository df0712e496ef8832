"""Two fits of one run on two clouds: each cloud receives only the tokens of its own fit.

With the real client libraries against simulated clouds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.client.fit import start_run
from spotfit.client.keyring import open_authenticated
from spotfit.client.request import FitRequest
from spotfit.client.run_config import RunConfig
from spotfit.client.run_handle import RunHandle, create_driver_ledger, supervise_run
from spotfit.core.ids import Token
from spotfit.frameworks.backend_config import BackendConfig
from spotfit.host.system import SystemClock
from spotfit.ledger.journal import read_run_id
from spotfit.model.config import ScalingConfig
from spotfit.model.events import FitEnded
from spotfit.model.view import View
from spotfit.store.factory import open_store
from spotfit_localsim.clouds.provisioner import SimProvisioner

TIMEOUT_S = 60.0

pytestmark = pytest.mark.real_time(reason="simulated clouds are processes")


def train() -> None:
    """Never called: no machine boots within the test."""


class TwoClouds:
    """A run in `tmp_path`, and all calls that the clouds in `tmp_path` receive."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clouds: dict[str, SimProvisioner] = {}
        self.calls: list[tuple[str, Token]] = []
        self._tmp_path = tmp_path
        self._monkeypatch = monkeypatch
        monkeypatch.setenv("SPOTFIT_HOME", str(tmp_path / "home"))
        for name in ("submit", "observe", "cancel", "find_group"):
            self._record(name)

    def _record(self, name: str) -> None:
        method = getattr(SimProvisioner, name)

        def recorded(sim: SimProvisioner, subject: Any, *others: Any) -> Any:
            # Background calls of an earlier test of this process may still be executed.
            if Path(sim.options.root or "").is_relative_to(self._tmp_path):
                self.calls.append((sim.options.cloud, subject.token))
            return method(sim, subject, *others)

        self._monkeypatch.setattr(SimProvisioner, name, recorded)

    def start_fit(self, cloud: str) -> RunHandle:
        options = {"cloud": cloud, "root": str(self._tmp_path / cloud), "boot_s": 3600.0}
        self.clouds[cloud] = SimProvisioner.with_options(**options)
        query = "&".join(f"{name}={value}" for name, value in options.items() if name != "cloud")
        return start_run(
            FitRequest(
                train,
                None,
                scaling=ScalingConfig(num_workers=1),
                run=RunConfig(name="run", storage_path=str(self._tmp_path / "results")),
                framework="none",
                framework_options={},
                backend_config=BackendConfig(),
                provisioner=f"sim://{cloud}?{query}",
            )
        )

    def lose_next_answer(self) -> None:
        """Let the next `submit` be executed and fail, as after a broken connection."""
        submit = SimProvisioner.submit

        def fail(sim: SimProvisioner, *arguments: Any) -> Any:
            self._monkeypatch.setattr(SimProvisioner, "submit", submit)
            submit(sim, *arguments)
            raise ConnectionError("the connection broke")

        self._monkeypatch.setattr(SimProvisioner, "submit", fail)

    def lose_next_request(self) -> None:
        """Let the next `submit` fail before it reaches the cloud."""
        submit = SimProvisioner.submit

        def fail(_sim: SimProvisioner, *_arguments: Any) -> Any:
            self._monkeypatch.setattr(SimProvisioner, "submit", submit)
            raise ConnectionError("the connection broke")

        self._monkeypatch.setattr(SimProvisioner, "submit", fail)

    def end_fit(self) -> None:
        """Record the end; the process that would release the machines has been killed."""
        store = open_authenticated(open_store(self.url))
        run_id = read_run_id(store)
        assert run_id is not None
        ledger = create_driver_ledger(store, run_id)
        ledger.append(FitEnded(outcome="cancelled"), after=ledger.catch_up())

    @property
    def url(self) -> str:
        return str(self._tmp_path / "results" / "run")

    @property
    def view(self) -> View:
        ledger = create_driver_ledger(open_authenticated(open_store(self.url)), self._run_id)
        view = ledger.catch_up()
        assert isinstance(view, View)
        return view

    @property
    def _run_id(self) -> Any:
        return read_run_id(open_store(self.url))

    def tokens_of(self, cloud: str) -> set[Token]:
        return {token for name, token in self.calls if name == cloud}

    def live_machines(self, cloud: str) -> list[Any]:
        machines = self.clouds[cloud].call_simulator("machines")
        return [machine for machine in machines if machine["state"] != "over"]


@pytest.fixture
def two_clouds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoClouds]:
    clouds = TwoClouds(tmp_path, monkeypatch)
    yield clouds
    for sim in clouds.clouds.values():
        sim.call_simulator("leave", {"machines": True})


def supervise_until(handle: RunHandle, condition: Callable[[], bool]) -> None:
    clock = SystemClock()
    deadline = clock.now() + TIMEOUT_S
    while not condition():
        assert clock.now() < deadline, "timed out"
        handle.supervise_once()
        clock.wait(0.05)


@pytest.mark.parametrize(
    ("earlier", "later"),
    [("aws_batch", "gcp_batch"), ("gcp_batch", "kubernetes"), ("kubernetes", "azure_batch")],
)
def test_an_unsettled_group_is_released_on_its_own_cloud_only(
    two_clouds: TwoClouds, earlier: str, later: str
) -> None:
    two_clouds.lose_next_answer()
    two_clouds.start_fit(earlier)
    (token,) = two_clouds.view.groups
    assert two_clouds.view.groups[token].is_pending
    two_clouds.end_fit()
    handle = two_clouds.start_fit(later)
    assert two_clouds.view.unsettled_groups.keys() <= {token}
    supervise_until(handle, lambda: not two_clouds.view.unsettled_groups)
    supervise_until(handle, lambda: not two_clouds.live_machines(earlier))
    (own,) = two_clouds.view.groups
    assert two_clouds.tokens_of(earlier) == {token}
    assert two_clouds.tokens_of(later) == {own}
    assert two_clouds.view.groups[own].handle is not None
    two_clouds.end_fit()
    supervise_run(two_clouds.url, duration_s=TIMEOUT_S)


def test_a_granted_group_is_released_on_its_own_cloud_only(two_clouds: TwoClouds) -> None:
    two_clouds.start_fit("plain")
    (token,) = two_clouds.view.groups
    assert two_clouds.view.groups[token].handle is not None
    two_clouds.end_fit()
    handle = two_clouds.start_fit("gcp_batch")
    supervise_until(handle, lambda: not two_clouds.view.unsettled_groups)
    supervise_until(handle, lambda: not two_clouds.live_machines("plain"))
    assert two_clouds.tokens_of("plain") == {token}
    assert token not in two_clouds.tokens_of("gcp_batch")


def test_a_group_that_was_never_submitted_is_submitted_nowhere(two_clouds: TwoClouds) -> None:
    two_clouds.lose_next_request()
    two_clouds.start_fit("kubernetes")
    (token,) = two_clouds.view.groups
    two_clouds.end_fit()
    handle = two_clouds.start_fit("plain")
    supervise_until(handle, lambda: not two_clouds.view.unsettled_groups)
    assert two_clouds.live_machines("kubernetes") == []
    assert token not in two_clouds.tokens_of("plain")

"""Every reader with objects of a run that were changed without the run key.

`pytest tests/sim/test_object_fuzz.py --cases 10000` reads 10,000 damaged runs.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from spotfit.checkpoint.committed import open_committed
from spotfit.checkpoint.gc import find_abandoned
from spotfit.client import run_handle
from spotfit.client.console import read_event_lines
from spotfit.client.result import Result
from spotfit.client.run_handle import attach
from spotfit.code.code_bundle import CodeBundlePayload, fetch_code_bundle, upload_code_bundle
from spotfit.code.function_pickle import load_sealed_pickle
from spotfit.code.runtime_env import RuntimeEnv
from spotfit.core.errors import SpotfitError
from spotfit.core.ids import Token
from spotfit.ledger import journal, keys
from spotfit.ledger.authenticated_store import AuthenticatedStore
from spotfit.ledger.journal import Journal, Ledger, write_cached_view
from spotfit.model.events import (
    FailureCause,
    FitEnded,
    FitStarted,
    GroupPlanned,
    GroupSubmitted,
    JournalEvent,
    LeaderElected,
    RoundClosed,
    RoundOpened,
)
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest
from spotfit.model.view import JournalView
from spotfit.store.factory import open_store
from spotfit.testing.builders import (
    RUN_ID,
    RUN_KEY,
    a_committed_checkpoint,
    a_member,
    a_round,
    a_spec,
    an_agent_id,
)
from tests.sim.object_damage import (
    FORGED_PROVISIONER,
    FORGED_TOKEN,
    damage,
    forge_entry,
    loaded_pickles,
)
from tests.unit.agent.simulated_cluster import FakeCluster
from tests.unit.checkpoint.saved_checkpoints import make_manifest, save_checkpoint
from tests.unit.control.fake_provisioner import FakeProvisioner

URL = "memory://fuzz/run"
TOKEN = Token("t-1")
RESULT_KEY = keys.result(2, 0)
RETURN_VALUE = {"answer": 42}


def train() -> int:
    """The training function of the run."""
    return 7


class EndedRun:
    """The objects of a finished run, and what its readers may return."""

    def __init__(self, where: Path) -> None:
        self.store = open_store(URL)
        self._write(where)
        self.objects = {found.key: self.store.get(found.key) for found in self.store.list()}
        self.views = [normalized(view) for view in self._views]
        self.members = list(Ledger(self.key_store, RUN_ID, an_agent_id(0)).list_members())

    @property
    def key_store(self) -> AuthenticatedStore:
        return AuthenticatedStore(self.store, RUN_KEY)

    def restore(self, objects: dict[str, bytes]) -> None:
        for found in list(self.store.list()):
            self.store.delete(found.key)
        for key, body in objects.items():
            self.store.put(key, body)

    def _write(self, where: Path) -> None:
        store = self.key_store
        ledger = Ledger(store, RUN_ID, an_agent_id(0))
        self.bundle = upload_code_bundle(
            train, None, runtime_env=RuntimeEnv(), key=RUN_KEY, store=store
        )
        for n, name in enumerate(("c1", "c2")):
            save_checkpoint(store, where / name, make_manifest(name, report=n), model=name)
        store.put(RESULT_KEY, RUN_KEY.seal(pickle.dumps(RETURN_VALUE), purpose=RESULT_KEY))
        for n in range(2):
            Ledger(store, RUN_ID, an_agent_id(n)).publish_member(a_member(n))
        ledger.renew_lease()
        self._views = [ledger.journal_view]
        for event in self._events():
            self._views.append(ledger.append(event, after=ledger.journal_view))
            if journal.is_cache_due(ledger.view):
                write_cached_view(store, ledger.cached_view())

    def _events(self) -> list[JournalEvent]:
        request = GroupRequest(token=TOKEN, num_workers=2, total_workers=2)
        plan = GroupPlan(
            token=TOKEN, provisioner="local", num_nodes=2, slots_per_node=1, body={"run": URL}
        )
        return [
            FitStarted(spec=a_spec(storage_url=URL, code_bundle=msgspec.to_builtins(self.bundle))),
            LeaderElected(leader=an_agent_id(0), epoch=1, coordinator_address="h:1"),
            GroupPlanned(request=request, plan=plan),
            GroupSubmitted(
                token=TOKEN, handle=GroupHandle(token=TOKEN, provisioner="local", name="g")
            ),
            RoundOpened(round=a_round(1)),
            a_committed_checkpoint("c1", metrics={"loss": 1.0}),
            RoundClosed(round_number=1, cause=FailureCause.WORKER, reason="a worker died"),
            RoundOpened(round=a_round(2)),
            a_committed_checkpoint("c2", report_index=1, metrics={"loss": 0.5}),
            FitEnded(outcome="finished", metrics={"loss": 0.25}, result_key=RESULT_KEY),
        ]


def normalized(view: JournalView) -> JournalView:
    """Return the view without its slot numbers, which skipped entries shift, and cancellation."""
    return replace(
        view,
        next_slot=0,
        latest_committed_slot=0,
        round_opened_slot=0,
        notice_slots={},
        cancel_reason=None,
    )


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []

    def open_recorded(name: str, _options: Any) -> FakeProvisioner:
        names.append(name)
        return FakeProvisioner()

    monkeypatch.setattr(run_handle, "open_provisioner", open_recorded)
    return names


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EndedRun]:
    monkeypatch.setenv("SPOTFIT_RUN_ID", RUN_ID)
    monkeypatch.setenv("SPOTFIT_RUN_SECRET", RUN_KEY.to_text())
    monkeypatch.setenv("SPOTFIT_HOME", str(tmp_path / "home"))
    # So that a short journal has cached views.
    monkeypatch.setattr(journal, "VIEW_CACHE_INTERVAL", 4)
    loaded_pickles.clear()
    run = EndedRun(tmp_path)
    yield run
    run.restore({})


def test_damaged_objects_give_an_error_or_what_the_run_wrote(
    run: EndedRun, opened: list[str], seed: int, request: pytest.FixtureRequest
) -> None:
    for case in range(request.config.getoption("--cases")):
        rng = random.Random(f"{seed} {case}")
        objects = dict(run.objects)
        done = damage(objects, rng, RUN_ID)
        run.restore(objects)
        for name, read in READERS.items():
            try:
                wrong = read(run)
            except SpotfitError:
                continue
            except Exception as raw:
                raise AssertionError(f"case {case}: {name} raised {raw!r} after {done}") from raw
            assert wrong is None, f"case {case}: {name} returned {wrong} after {done}"
        assert not loaded_pickles, f"case {case}: a pickle was loaded after {done}"
        assert FORGED_PROVISIONER not in opened, f"case {case}: after {done}"


def read_journal(run: EndedRun) -> object:
    view = Journal(run.key_store).catch_up()
    return None if normalized(view) in run.views else view


def read_result(run: EndedRun) -> object:
    result = Result.from_path(URL)
    if result.metrics not in ({"loss": 1.0}, {"loss": 0.5}, {"loss": 0.25}):
        return result.metrics
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        found = Path(directory, "model").read_text()
    return None if found == Path(result.checkpoint.path).name else found


def read_status(_run: EndedRun) -> object:
    handle = attach(URL)
    status = handle.status()
    # Supervision of an ended run: it releases machines.
    handle.supervise_once()
    return None if set(status.checkpoints) <= {"c1", "c2"} else status


def read_checkpoints(run: EndedRun) -> object:
    for name in ("c1", "c2"):
        with suppress(SpotfitError), open_committed(run.key_store, name).as_directory() as folder:
            text = Path(folder, "model").read_text()
            if text != name:
                return text
    return None


def read_members(run: EndedRun) -> object:
    ledger = Ledger(run.key_store, RUN_ID, an_agent_id(0))
    others = [member for member in ledger.list_members() if member not in run.members]
    lease = ledger.read_lease(an_agent_id(0))
    return others or (lease if lease not in (0, 1) else None)


def read_return_value(run: EndedRun) -> object:
    value = load_sealed_pickle(run.store.get(RESULT_KEY), RUN_KEY, purpose=RESULT_KEY)
    return None if value == RETURN_VALUE else value


def read_code(run: EndedRun) -> object:
    envelope = fetch_code_bundle(run.bundle, store=run.store)
    payload = CodeBundlePayload.open(envelope, key=RUN_KEY)
    return None if payload.load_function().fn() == 7 else payload


def read_debris(run: EndedRun) -> object:
    find_abandoned(run.key_store, retained=("c1", "c2"), before_round=9)
    return None


def read_without_key(run: EndedRun) -> object:
    """Nothing is verified; only errors and pickles count."""
    with suppress(SpotfitError):
        Journal(run.store).catch_up()
    with suppress(SpotfitError):
        read_event_lines(run.store)
    list(Ledger(run.store, RUN_ID, an_agent_id(0)).list_members())
    return None


READERS: dict[str, Callable[[EndedRun], object]] = {
    "journal": read_journal,
    "result": read_result,
    "status": read_status,
    "checkpoints": read_checkpoints,
    "members": read_members,
    "return value": read_return_value,
    "code": read_code,
    "debris": read_debris,
    "without the key": read_without_key,
}


def test_a_running_leader_does_nothing_for_damaged_objects(
    seed: int, request: pytest.FixtureRequest
) -> None:
    for case in range(max(10, request.config.getoption("--cases") // 15)):
        rng = random.Random(f"leader {seed} {case}")
        world = FakeCluster()
        world.wait_for_round()
        done: list[str] = []
        for _ in range(4):
            done.append(forge_entry(world.bucket.objects, rng, RUN_ID))
            if rng.random() < 0.5:
                done += damage(world.bucket.objects, rng, RUN_ID)
            if rng.random() < 0.3:
                world.kill(rng.choice(sorted(world.nodes.values(), key=lambda node: node.name)))
            # The error with which an agent ends that reads the journal for the first time.
            try:
                world.advance(rng.uniform(0.5, 5.0))
            except SpotfitError:
                continue
            except Exception as raw:
                raise AssertionError(f"case {case}: {raw!r} after {done}") from raw
        assert FORGED_TOKEN not in world.cloud.submitted_tokens, f"case {case}: {done}"
        assert not loaded_pickles, f"case {case}: {done}"

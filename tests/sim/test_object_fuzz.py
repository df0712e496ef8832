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
from spotfit.client import result as client_result
from spotfit.client import run_handle
from spotfit.client.console import read_event_lines
from spotfit.client.result import Result
from spotfit.client.run_handle import attach
from spotfit.code.code_bundle import CodeBundlePayload, fetch_code_bundle, upload_code_bundle
from spotfit.code.function_pickle import load_sealed_pickle
from spotfit.code.runtime_env import RuntimeEnv
from spotfit.core.errors import NotFoundError, SpotfitError
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
from spotfit.security.object_mac import ObjectMac
from spotfit.security.run_key import RunKey
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
LEASES = (3, 9)
"""How often each agent has renewed its lease."""


def train() -> int:
    """The training function of the run."""
    return 7


class EndedRun:
    """The objects of a finished run, and what its readers may return."""

    def __init__(self, where: Path) -> None:
        self.store = open_store(URL)
        self.members = [a_member(0), a_member(1), a_member(1, peer_store_address="h:2")]
        self.earlier: dict[str, list[bytes]] = {}
        """Bodies that the run has overwritten, by key."""
        self._write(where)
        self.objects = self.read_objects()
        self.views = [normalized(view) for view in self._views]

    def read_objects(self) -> dict[str, bytes]:
        return {found.key: self.store.get(found.key) for found in self.store.list()}

    @property
    def intact_entries(self) -> int:
        """The number of entries before the first one that differs from what the run wrote."""
        objects, slot = self.read_objects(), 0
        while (
            slot < len(self.views) - 1
            and objects.get(keys.entry(slot)) == (self.objects[keys.entry(slot)])
        ):
            slot += 1
        return slot

    def find_lost_entries(self, state: int, *, detects_gaps: bool = True) -> str | None:
        """Return what a reader lacks that has found the first `state` entries; None for nothing.

        Removed entries at the end cannot be detected, and those before a cached view are not read.
        """
        if state < self.intact_entries:
            return f"{state} of {self.intact_entries} intact entries"
        later = {keys.entry(n) for n in range(state + 1, len(self.views))}
        objects = self.read_objects()
        if detects_gaps and keys.entry(state) not in objects and later & objects.keys():
            return f"the first {state} entries in spite of later ones"
        return None

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
        for member in self.members:
            self._keep_earlier(keys.member(member.agent))
            Ledger(store, RUN_ID, member.agent).publish_member(member)
        for n, renewals in enumerate(LEASES):
            renewing = Ledger(store, RUN_ID, an_agent_id(n))
            for _ in range(renewals):
                self._keep_earlier(keys.lease(an_agent_id(n)))
                renewing.renew_lease()
        self._views = [ledger.journal_view]
        for event in self._events():
            self._views.append(ledger.append(event, after=ledger.journal_view))
            if journal.is_cache_due(ledger.view):
                write_cached_view(store, ledger.cached_view())

    def _keep_earlier(self, key: str) -> None:
        with suppress(NotFoundError):
            body = self.store.get(key)
            self.earlier.setdefault(key, []).append(body)

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
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_RUN_ID", RUN_ID)
    monkeypatch.setenv("SPOTFIT_RUN_SECRET", RUN_KEY.to_text())
    monkeypatch.setenv("SPOTFIT_HOME", str(tmp_path / "home"))
    # So that a short journal has cached views.
    monkeypatch.setattr(journal, "VIEW_CACHE_INTERVAL", 4)


@pytest.fixture
def run(tmp_path: Path, environment: None) -> Iterator[EndedRun]:
    loaded_pickles.clear()
    run = EndedRun(tmp_path)
    yield run
    run.restore({})


@pytest.mark.timeout(0)  # the option --cases decides
def test_damaged_objects_give_an_error_or_what_the_run_wrote(
    run: EndedRun, opened: list[str], seed: int, request: pytest.FixtureRequest
) -> None:
    for case in range(request.config.getoption("--cases")):
        check_case(run, opened, f"{seed} {case}")


def check_case(run: EndedRun, opened: list[str], case: str) -> None:
    """Read a damaged run with every reader. Raises `AssertionError` for a wrong value."""
    objects = dict(run.objects)
    done = damage(objects, random.Random(case), RUN_ID, earlier=run.earlier)
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


class EqualToAll(str):
    """A hash of earlier entries that always fits."""

    __hash__ = str.__hash__

    def __eq__(self, _other: object) -> bool:
        return True

    def __ne__(self, _other: object) -> bool:
        return False


def remove_mac_check(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ObjectMac, "is_valid", lambda *_: True)


def leave_out_the_position(patch: pytest.MonkeyPatch) -> None:
    compute = ObjectMac._compute
    patch.setattr(ObjectMac, "_compute", lambda self, _key, content: compute(self, "", content))


def remove_chain_check(patch: pytest.MonkeyPatch) -> None:
    split = journal._split_body
    patch.setattr(journal, "_split_body", lambda body: (split(body)[0], EqualToAll()))


def trust_sealed_values(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunKey, "open", lambda _self, sealed, **_: bytes(sealed))


def ignore_gaps(patch: pytest.MonkeyPatch) -> None:
    for module in (client_result, run_handle):
        patch.setattr(module, "check_no_gaps", lambda *_: None)


@pytest.mark.parametrize(
    "weaken",
    [
        remove_mac_check,
        leave_out_the_position,
        remove_chain_check,
        trust_sealed_values,
        ignore_gaps,
    ],
)
def test_weakened_authentication_is_detected(
    weaken: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    opened: list[str],
    environment: None,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        weaken(patch)
        run = EndedRun(tmp_path)
        try:
            for case in range(1500):
                check_case(run, opened, f"weakened {case}")
        except AssertionError:
            return
        finally:
            loaded_pickles.clear()
            run.restore({})
    pytest.fail("not detected")


def read_journal(run: EndedRun) -> object:
    view = Journal(run.key_store).catch_up()
    states = [n for n, written in enumerate(run.views) if written == normalized(view)]
    # Followers read during the run: they take a gap for the end.
    return run.find_lost_entries(states[-1], detects_gaps=False) if states else view


def read_result(run: EndedRun) -> object:
    result = Result.from_path(URL)
    losses = [1.0, 0.5, 0.25]
    if result.metrics is None or result.metrics.get("loss") not in losses:
        return result.metrics
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        found = Path(directory, "model").read_text()
    if found != Path(result.checkpoint.path).name:
        return found
    # The last entries of these metrics: before the second commit, before the end, and the end.
    return run.find_lost_entries(8 + losses.index(result.metrics["loss"]))


def read_status(run: EndedRun) -> object:
    handle = attach(URL)
    status = handle.status()
    # Supervision of an ended run: it releases machines.
    handle.supervise_once()
    if status.checkpoints not in ((), ("c1",), ("c1", "c2")):
        return status
    last = 10 if status.state == "finished" else (5, 8, 9)[len(status.checkpoints)]
    return run.find_lost_entries(last)


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
    leases = [ledger.read_lease(an_agent_id(n)) for n in range(len(LEASES))]
    # An earlier counter is a value of the run, and does not show that the leader is alive.
    wrong = [lease for lease, last in zip(leases, LEASES, strict=True) if lease > last]
    return others or wrong or None


def read_return_value(run: EndedRun) -> object:
    value = load_sealed_pickle(lambda: run.store.get(RESULT_KEY), RUN_KEY, purpose=RESULT_KEY)
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


@pytest.mark.timeout(0)  # the option --cases decides
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

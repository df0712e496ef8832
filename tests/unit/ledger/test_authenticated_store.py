"""`AuthenticatedStore`: which objects have a MAC, and what happens without a valid one."""

from __future__ import annotations

import pickle

import pytest

from spotfit.checkpoint.manifest import read_manifest
from spotfit.core.codec import encode
from spotfit.core.errors import IntegrityError
from spotfit.ledger import keys
from spotfit.ledger.authenticated_store import AuthenticatedStore
from spotfit.ledger.journal import Ledger, read_newest_view, write_cached_view
from spotfit.model.events import FitStarted
from spotfit.model.topology import StandbyReport
from spotfit.security.object_mac import ObjectMac, strip_mac
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import (
    RUN_ID,
    RUN_KEY,
    TOKEN,
    a_member,
    a_spec,
    an_agent_crash,
    an_agent_id,
)
from tests.unit.checkpoint.saved_checkpoints import make_manifest

MEMBER = keys.member(an_agent_id(0))
MANIFEST = make_manifest("c1")


@pytest.fixture
def plain() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def store(plain: MemoryStore) -> AuthenticatedStore:
    return AuthenticatedStore(plain, RUN_KEY)


@pytest.fixture
def ledger(store: AuthenticatedStore) -> Ledger:
    return Ledger(store, RUN_ID, an_agent_id(0))


@pytest.mark.parametrize(
    "key",
    [
        MEMBER,
        keys.lease(an_agent_id(0)),
        keys.cached_view(256),
        keys.manifest("c1", 1, 0),
        keys.name_marker("c1", 1, generated=True),
    ],
)
def test_objects_that_decisions_depend_on_have_a_mac(
    store: AuthenticatedStore, plain: MemoryStore, key: str
) -> None:
    store.put(key, b"1")
    assert strip_mac(store.get(key)) == b"1"
    assert plain.get(key) != b"1"
    plain.put(key, b"1")
    with pytest.raises(IntegrityError, match=f"{key} in .* is not authentic"):
        store.get(key)


@pytest.mark.parametrize("key", ["c1/model.pt", keys.entry(0)])
def test_other_objects_are_stored_unchanged(
    store: AuthenticatedStore, plain: MemoryStore, key: str
) -> None:
    store.put(key, b"1")
    assert plain.get(key) == store.get(key) == b"1"


def test_an_answer_that_was_damaged_in_transit_is_read_again(plain: MemoryStore) -> None:
    class Damaging(MemoryStore):
        damaged = 0

        def get(self, key: str) -> bytes:
            self.damaged += 1
            body = plain.get(key)
            return body if self.damaged > 4 else body[:-1]

    AuthenticatedStore(plain, RUN_KEY).put(MEMBER, b"1")
    assert strip_mac(AuthenticatedStore(Damaging(), RUN_KEY).get(MEMBER)) == b"1"


def test_a_pickled_copy_has_no_key(store: AuthenticatedStore) -> None:
    pickled = pickle.dumps(store)
    assert isinstance(pickle.loads(pickled), MemoryStore)
    assert b"the run key of tests" not in pickled


def test_the_store_of_a_folder_is_plain(store: AuthenticatedStore) -> None:
    assert isinstance(store.subtree("c1"), MemoryStore)


def test_a_member_that_is_not_authentic_is_skipped(ledger: Ledger, plain: MemoryStore) -> None:
    ledger.publish_member(a_member(0))
    plain.put(keys.member(an_agent_id(1)), encode(a_member(1)))
    plain.put(keys.member(an_agent_id(2)), plain.get(MEMBER))
    assert list(ledger.list_members()) == [a_member(0)]


def test_a_standby_report_that_is_not_authentic_is_skipped(
    ledger: Ledger, plain: MemoryStore
) -> None:
    """The run is handed over to the address in a report."""
    report = StandbyReport(member=a_member(0), renewal=1, is_warm=True)
    ledger.publish_standby(report)
    forged = StandbyReport(member=a_member(1), renewal=1, is_warm=True)
    plain.put(keys.standby(TOKEN, an_agent_id(1)), encode(forged))
    plain.put(keys.standby(TOKEN, an_agent_id(2)), plain.get(keys.standby(TOKEN, an_agent_id(0))))
    assert ledger.read_standby([TOKEN]) == [report]


def test_a_crash_that_is_not_authentic_counts_as_none(ledger: Ledger, plain: MemoryStore) -> None:
    """Crashes end runs."""
    crash = an_agent_crash(0)
    plain.put(keys.crash(crash.token, crash.node), encode(crash))
    assert ledger.read_crash(crash.token, crash.node) is None
    ledger.publish_crash(crash)
    assert ledger.read_crash(crash.token, crash.node) == crash


def test_a_forged_or_replayed_lease_does_not_show_a_living_leader(
    ledger: Ledger, plain: MemoryStore
) -> None:
    key = keys.lease(an_agent_id(0))
    ledger.renew_lease()
    old = plain.get(key)
    ledger.renew_lease()
    assert ledger.read_lease(an_agent_id(0)) == 2
    plain.put(key, b"3")
    assert ledger.read_lease(an_agent_id(0)) == 0
    plain.put(key, old)
    assert ledger.read_lease(an_agent_id(0)) == 1, "lower than before: no renewal"
    plain.put(keys.lease(an_agent_id(1)), old)
    assert ledger.read_lease(an_agent_id(1)) == 0, "the counter of another leader"


def test_a_cached_view_that_is_not_authentic_is_ignored(
    ledger: Ledger, store: AuthenticatedStore, plain: MemoryStore
) -> None:
    ledger.append(FitStarted(spec=a_spec()), after=ledger.journal_view)
    cached = ledger.cached_view()
    write_cached_view(store, cached)
    assert read_newest_view(store) == cached
    plain.put(keys.cached_view(2), encode(cached))
    plain.put(keys.cached_view(3), plain.get(keys.cached_view(1)))
    assert read_newest_view(store) == cached


def test_a_cached_view_under_the_key_of_another_slot_is_ignored(ledger: Ledger) -> None:
    ledger.append(FitStarted(spec=a_spec()), after=ledger.journal_view)
    plain = MemoryStore()
    plain.put(keys.cached_view(7), encode(ledger.cached_view()))
    assert read_newest_view(plain) is None


def test_a_manifest_that_is_not_authentic_does_not_exist(
    store: AuthenticatedStore, plain: MemoryStore
) -> None:
    store.put(MANIFEST.key, encode(MANIFEST))
    assert read_manifest(store, MANIFEST.key) == MANIFEST
    plain.put(MANIFEST.key, encode(MANIFEST))
    assert read_manifest(store, MANIFEST.key) is None
    assert read_manifest(plain, MANIFEST.key) == MANIFEST, "without the key it is not verified"


def test_the_mac_of_the_journal_is_not_that_of_another_object(plain: MemoryStore) -> None:
    body = ObjectMac(RUN_KEY).add(keys.entry(0), encode(MANIFEST))
    plain.put(MANIFEST.key, body)
    assert read_manifest(AuthenticatedStore(plain, RUN_KEY), MANIFEST.key) is None

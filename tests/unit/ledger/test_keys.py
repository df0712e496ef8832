"""The map of the bucket: every key apart from every other, and in the order of its numbers."""

from spotfit.core.ids import AgentId
from spotfit.ledger import keys
from spotfit.testing.builders import an_agent

A, B = an_agent(0), an_agent(1)

ALL = [
    keys.entry(7),
    keys.entry(70),
    keys.snapshot(7),
    keys.beat(A),
    keys.beat(B),
    keys.offer(A),
    keys.offer(B),
    keys.manifest("c1", 1, 0),
    keys.manifest("c1", 1, 1),
    keys.manifest("c2", 1, 0),
    keys.begun("c1", 1, made=True),
    keys.begun("c1", 1, made=False),
    keys.failure(1, 0),
    keys.machine_failure(A),
    keys.failure(2, 0),
    keys.result(1, 0),
    keys.reports(A, 0),
    keys.reports(B, 0),
    keys.logs(A, 0),
    keys.logs(A, 1),
]


def test_no_two_things_share_a_key() -> None:
    assert len(set(ALL)) == len(ALL)


def test_nothing_of_ours_lies_among_the_users_folders() -> None:
    assert all(key.startswith(keys.OURS) for key in ALL)


def test_what_lies_among_the_manifests_tells_whose_it_is() -> None:
    assert keys.read_trace(keys.manifest("a/b", 12, 3)) == keys.Trace("a/b", 12, "json")
    assert keys.read_trace(keys.begun("c1", 7, made=True)) == keys.Trace("c1", 7, "made")
    assert keys.read_trace(keys.begun("c1", 7, made=False)) == keys.Trace("c1", 7, "chosen")
    for other in (keys.entry(7), f"{keys.MANIFESTS}c1/notes.txt", f"{keys.MANIFESTS}1.made"):
        assert keys.read_trace(other) is None


def test_a_listing_is_in_the_order_of_the_numbers() -> None:
    slots = [0, 9, 10, 255, 256, 10**12]
    assert sorted(map(keys.entry, slots)) == [keys.entry(slot) for slot in slots]
    assert sorted(map(keys.snapshot, slots)) == [keys.snapshot(slot) for slot in slots]
    agent = AgentId("a-0")
    assert sorted(keys.logs(agent, n) for n in (2, 10, 1)) == [
        keys.logs(agent, n) for n in (1, 2, 10)
    ]


def test_the_folders_that_are_listed_hold_what_they_are_listed_for() -> None:
    assert keys.entry(0).startswith(keys.JOURNAL)
    assert keys.snapshot(0).startswith(keys.SNAPSHOTS)
    assert keys.offer(A).startswith(keys.OFFERS)
    assert keys.manifest("c1", 1, 0).startswith(keys.MANIFESTS)


def test_who_shares_files_is_told_by_its_key() -> None:
    key = keys.sharer("a", "b-2", 3, 1)
    assert keys.read_sharer(key, "a") == keys.Sharer("b-2", 3, 1)
    assert keys.manifest(*keys.Sharer("b-2", 3, 1)) == keys.manifest("b-2", 3, 1)
    assert keys.read_sharer(key, "b") is None
    assert keys.read_sharer(f"{keys.SHARES}a/nonsense", "a") is None

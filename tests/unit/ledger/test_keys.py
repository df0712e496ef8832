"""Object keys: distinct, ordered and parsable."""

from spotfit.core.ids import AgentId, Token
from spotfit.ledger import keys
from spotfit.testing.builders import an_agent_id

A, B = an_agent_id(0), an_agent_id(1)

ALL = [
    keys.entry(7),
    keys.entry(70),
    keys.cached_view(7),
    keys.lease(A),
    keys.lease(B),
    keys.member(A),
    keys.member(B),
    keys.manifest("c1", 1, 0),
    keys.manifest("c1", 1, 1),
    keys.manifest("c2", 1, 0),
    keys.name_marker("c1", 1, generated=True),
    keys.name_marker("c1", 1, generated=False),
    keys.failure(1, 0),
    keys.agent_failure(A),
    keys.failure(2, 0),
    keys.result(1, 0),
    keys.reports(A, 0),
    keys.reports(B, 0),
    keys.logs(A, 0),
    keys.logs(A, 1),
]


def test_all_keys_are_distinct() -> None:
    assert len(set(ALL)) == len(ALL)


def test_all_reserved_keys_have_the_reserved_prefix() -> None:
    assert all(key.startswith(keys.RESERVED_PREFIX) for key in ALL)


def test_manifest_keys_and_name_markers_are_parsed() -> None:
    assert keys.parse_manifest_key(keys.manifest("a/b", 12, 3)) == keys.ManifestKey(
        "a/b", 12, "json"
    )
    assert keys.parse_manifest_key(keys.name_marker("c1", 7, generated=True)) == keys.ManifestKey(
        "c1", 7, "made"
    )
    assert keys.parse_manifest_key(keys.name_marker("c1", 7, generated=False)) == keys.ManifestKey(
        "c1", 7, "chosen"
    )
    for other in (keys.entry(7), f"{keys.MANIFESTS}c1/notes.txt", f"{keys.MANIFESTS}1.made"):
        assert keys.parse_manifest_key(other) is None


def test_a_listing_is_in_numerical_order() -> None:
    slots = [0, 9, 10, 255, 256, 10**12]
    assert sorted(map(keys.entry, slots)) == [keys.entry(slot) for slot in slots]
    assert sorted(map(keys.cached_view, slots)) == [keys.cached_view(slot) for slot in slots]
    agent = AgentId("a-0")
    assert sorted(keys.logs(agent, n) for n in (2, 10, 1)) == [
        keys.logs(agent, n) for n in (1, 2, 10)
    ]


def test_keys_are_below_their_listed_prefixes() -> None:
    assert keys.entry(0).startswith(keys.JOURNAL)
    assert keys.cached_view(0).startswith(keys.VIEWS)
    assert keys.member(A).startswith(keys.MEMBERS)
    assert keys.standby(Token("t-1"), A) == f"{keys.STANDBY}t-1/{A}.json"
    assert keys.manifest("c1", 1, 0).startswith(keys.MANIFESTS)


def test_a_checkpoint_ref_key_is_parsed() -> None:
    key = keys.checkpoint_ref("a", "b-2", 3, 1)
    assert keys.parse_checkpoint_ref(key) == keys.CheckpointRef("b-2", 3, 1, folder="a")
    nested = keys.checkpoint_ref("a/b", "b-2", 3, 1)
    assert keys.parse_checkpoint_ref(nested) == keys.CheckpointRef("b-2", 3, 1, folder="a/b")
    assert keys.parse_checkpoint_ref(f"{keys.REFS}a/nonsense") is None


def test_every_log_line_has_a_source() -> None:
    assert [keys.format_log_source(rank) for rank in (0, 12, keys.SIDECAR_RANK, keys.RUN_RANK)] == [
        "rank 0",
        "rank 12",
        "sidecar",
        "run",
    ]

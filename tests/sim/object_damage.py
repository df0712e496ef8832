"""Random damage to the objects of a run by a writer without the run key."""

from __future__ import annotations

import hashlib
import pickle
import random
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import MappingProxyType

from spotfit.core.codec import encode
from spotfit.core.ids import AgentId, RunId, Token
from spotfit.ledger import keys
from spotfit.model.events import (
    CheckpointCommitted,
    FitEnded,
    FitStarted,
    GroupPlanned,
    JournalEntry,
    JournalEvent,
    LeaderElected,
)
from spotfit.model.group import GroupPlan, GroupRequest
from spotfit.security.object_mac import strip_mac
from spotfit.testing.builders import a_spec

Objects = MutableMapping[str, bytes]

FORGED_TOKEN = Token("t-forged")
FORGED_PROVISIONER = "forged"
loaded_pickles: list[str] = []
"""Which pickles of the attacker were loaded; empty unless spotfit is wrong."""


def _record_load() -> None:
    loaded_pickles.append("loaded")


class _Canary:
    def __reduce__(self) -> tuple[object, ...]:
        # A function of a module: a bound method would be pickled with a copy of the list.
        return (_record_load, ())


def forged_events() -> list[JournalEvent]:
    """Events that would run a command, name a backend, or end the run with another result."""
    plan = GroupPlan(
        token=FORGED_TOKEN,
        provisioner=FORGED_PROVISIONER,
        num_nodes=1,
        slots_per_node=1,
        body={"command": "touch /tmp/forged"},
    )
    return [
        FitStarted(spec=a_spec(provisioner=FORGED_PROVISIONER)),
        GroupPlanned(
            request=GroupRequest(token=FORGED_TOKEN, num_workers=1, total_workers=1), plan=plan
        ),
        LeaderElected(leader=AgentId("forged"), epoch=99, coordinator_address="h:1"),
        FitEnded(outcome="finished", metrics={"loss": -1.0}),
        CheckpointCommitted(
            name="forged", round=9, report_index=0, metrics={"loss": -1.0}, ranks=(0,)
        ),
    ]


def damage(
    objects: Objects,
    rng: random.Random,
    run_id: RunId,
    *,
    earlier: Mapping[str, Sequence[bytes]] = MappingProxyType({}),
) -> list[str]:
    """Change the objects in one to three ways, and return what was done.

    `earlier` has bodies that the run has overwritten or deleted, by key.
    """
    done = []
    for _ in range(rng.randint(1, 3)):
        if earlier and rng.random() < 1 / len(_DAMAGES):
            key = rng.choice(sorted(earlier))
            objects[key] = rng.choice(earlier[key])
            done.append(f"restored an earlier version of {key}")
        elif objects:
            done.append(rng.choice(_DAMAGES)(objects, rng, run_id))
    return done


def _modify(objects: Objects, rng: random.Random, _run_id: RunId) -> str:
    key = _draw(objects, rng)
    body = bytearray(objects[key])
    for _ in range(rng.randint(1, 4) if body else 0):
        body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
    objects[key] = bytes(body)
    return f"modified {key}"


def _modify_digit(objects: Objects, rng: random.Random, _run_id: RunId) -> str:
    """Change a number or identifier, so that the object can still be decoded."""
    key = _draw(objects, rng)
    digits = [match.start() for match in re.finditer(rb"[0-9]", objects[key])]
    if digits:
        at, body = rng.choice(digits), bytearray(objects[key])
        body[at] = ord("0") + (body[at] - ord("0") + rng.randint(1, 9)) % 10
        objects[key] = bytes(body)
    return f"changed a digit of {key}"


def _truncate(objects: Objects, rng: random.Random, _run_id: RunId) -> str:
    key = _draw(objects, rng)
    objects[key] = objects[key][: rng.randrange(len(objects[key]) + 1)]
    return f"truncated {key}"


def _delete(objects: Objects, rng: random.Random, _run_id: RunId) -> str:
    key = _draw(objects, rng)
    del objects[key]
    return f"deleted {key}"


def _delete_middle_entry(objects: Objects, rng: random.Random, _run_id: RunId) -> str:
    entries = sorted(key for key in objects if keys.is_entry(key))
    if len(entries) < 3:
        return "nothing"
    key = rng.choice(entries[1:-1])
    del objects[key]
    return f"deleted {key}"


def _swap_entries(objects: Objects, rng: random.Random, _run_id: RunId) -> str:
    entries = sorted(key for key in objects if keys.is_entry(key))
    if len(entries) < 2:
        return "nothing"
    one, other = rng.sample(entries, 2)
    objects[one], objects[other] = objects[other], objects[one]
    return f"exchanged {one} and {other}"


def _swap(objects: Objects, rng: random.Random, _run_id: RunId) -> str:
    one = _draw(objects, rng)
    other = rng.choice(_objects_of_kind(objects, one))
    objects[one], objects[other] = objects[other], objects[one]
    return f"exchanged {one} and {other}"


def _replay(objects: Objects, rng: random.Random, _run_id: RunId) -> str:
    one = _draw(objects, rng)
    other = rng.choice(_objects_of_kind(objects, one))
    objects[one] = objects[other]
    return f"copied {other} to {one}"


def _replay_at_the_end(objects: Objects, rng: random.Random, _run_id: RunId) -> str:
    source = rng.choice(_objects_of_kind(objects, keys.entry(0)))
    target = _free_entry(objects, rng)
    objects[target] = objects[source]
    return f"copied {source} to {target}"


def forge_entry(objects: Objects, rng: random.Random, run_id: RunId) -> str:
    """Write an entry without the key, mostly to the next slot; return what was done."""
    target = _free_entry(objects, rng)
    if rng.random() < 0.3:
        target = rng.choice(_objects_of_kind(objects, keys.entry(0)))
    event = rng.choice(forged_events())
    body = encode(JournalEntry(run_id=run_id, author=AgentId("forged"), event=event))
    if rng.random() < 0.8:
        # Everything but the MAC is right: the hash of the entries before it needs no key.
        previous = "0" * 64
        for key in sorted(key for key in objects if key.startswith(keys.JOURNAL) and key < target):
            previous = hashlib.sha256(previous.encode() + objects[key]).hexdigest()
        body += f"\nprevious {previous}\nhmac-sha256 {'0' * 64}".encode()
    objects[target] = body
    return f"forged {target}: {type(event).__name__}"


def _remove_mac(objects: Objects, rng: random.Random, _run_id: RunId) -> str:
    key = _draw(objects, rng)
    objects[key] = strip_mac(objects[key])
    return f"removed the MAC of {key}"


def _replace_by_pickle(objects: Objects, rng: random.Random, _run_id: RunId) -> str:
    key = _draw(objects, rng)
    objects[key] = pickle.dumps(_Canary())
    return f"replaced {key} by a pickle"


def _replace_by_junk(objects: Objects, rng: random.Random, _run_id: RunId) -> str:
    key = _draw(objects, rng)
    objects[key] = rng.choice(
        (b"", b"null", b"{}", b"\xff\xfe", b"[" * 5000, b"9" * 5000, rng.randbytes(40))
    )
    return f"replaced {key} by junk"


_DAMAGES: tuple[Callable[[Objects, random.Random, RunId], str], ...] = (
    _modify,
    _modify_digit,
    _truncate,
    _delete,
    _delete_middle_entry,
    _swap,
    _swap_entries,
    _replay,
    _replay_at_the_end,
    forge_entry,
    _remove_mac,
    _replace_by_pickle,
    _replace_by_junk,
)


def _draw(objects: Mapping[str, bytes], rng: random.Random) -> str:
    # Kinds have equal weight: most objects are entries of the journal.
    kinds = sorted({_kind(key) for key in objects})
    kind = rng.choice(kinds)
    return rng.choice(sorted(key for key in objects if _kind(key) == kind))


def _objects_of_kind(objects: Mapping[str, bytes], key: str) -> list[str]:
    """Return the objects of the same kind; all if there is no other one."""
    same = sorted(other for other in objects if _kind(other) == _kind(key))
    return same if len(same) > 1 else sorted(objects)


def _kind(key: str) -> str:
    return "/".join(key.split("/")[:2]) if key.startswith(keys.RESERVED_PREFIX) else "files"


def _free_entry(objects: Mapping[str, bytes], rng: random.Random) -> str:
    free = next(slot for slot in range(10**6) if keys.entry(slot) not in objects)
    return keys.entry(free + (rng.randint(1, 3) if rng.random() < 0.2 else 0))

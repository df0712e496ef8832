"""The map of the bucket: every key below a run's root, who writes it, and of which kind it is.

A key is *fixed* (created once, never changed) or *own* (put by one writer only). There is no
third kind: nothing is ever read, modified and written back.

    <checkpoint name>/…                          fixed  every rank that passed files
    .spotfit/journal/<slot>.json                 fixed  whoever wins the slot
    .spotfit/snapshots/<slot>.json               fixed  the leader
    .spotfit/beats/<agent>                       own    that agent, while it leads
    .spotfit/offers/<agent>.json                 own    that agent
    .spotfit/fn/<sha256>.pkl                     fixed  the door
    .spotfit/code/<sha256>.tar.gz                fixed  the door
    .spotfit/manifests/<name>/<round>-<rank>.json  fixed  that rank
    .spotfit/manifests/<name>/<round>.<kind>       fixed  the leader: made or chosen, by whom
    .spotfit/shares/<folder>/<name>/<round>-<rank>  fixed  that rank: its manifest lists files there
    .spotfit/failures/<round>-<rank>.pkl         own    the agent of that rank
    .spotfit/failures/<agent>.pkl                own    that agent, if it can start no worker
    .spotfit/failures/hook-<sha256>.pkl          fixed  the process of the callbacks
    .spotfit/results/<round>-<rank>.pkl          own    the agent of that rank
    .spotfit/reports/<agent>/<n>.jsonl           fixed  that agent, while it leads
    .spotfit/stacks/<agent>-<round>-<n>.txt      fixed  that agent, while it leads
    .spotfit/logs/<agent>/<n>.jsonl              fixed  that agent
"""

from __future__ import annotations

import re
from typing import NamedTuple

from spotfit.core.ids import AgentId

OURS = ".spotfit/"
JOURNAL = ".spotfit/journal/"
SNAPSHOTS = ".spotfit/snapshots/"
OFFERS = ".spotfit/offers/"
MANIFESTS = ".spotfit/manifests/"
SHARES = ".spotfit/shares/"


def entry(slot: int) -> str:
    """One entry of the journal."""
    return f"{JOURNAL}{slot:020d}.json"


def snapshot(slot: int) -> str:
    """The view before that slot."""
    return f"{SNAPSHOTS}{slot:020d}.json"


def beat(agent: AgentId) -> str:
    """The lease of a leader: a counter that grows while it lives."""
    return f".spotfit/beats/{agent}"


def offer(agent: AgentId) -> str:
    """What an agent says of itself."""
    return f"{OFFERS}{agent}.json"


def manifest(name: str, round_number: int, rank: int) -> str:
    """What one rank brought to a checkpoint."""
    return f"{MANIFESTS}{name}/{round_number}-{rank}.json"


class Sharer(NamedTuple):
    """A part of a checkpoint that lists files in the folder of another."""

    name: str
    round: int
    rank: int


def sharer(folder: str, name: str, round_number: int, rank: int) -> str:
    """That this rank's part of `name` lists files in that folder."""
    return f"{SHARES}{folder}/{name}/{round_number}-{rank}"


def read_sharer(key: str, folder: str) -> Sharer | None:
    """What that key tells; None where it is none of that folder's."""
    found = _SHARER.fullmatch(key.removeprefix(f"{SHARES}{folder}/"))
    return Sharer(found[1], int(found[2]), int(found[3])) if found else None


_SHARER = re.compile(r"([^/]+)/(\d+)-(\d+)")


def begun(name: str, round_number: int, *, made: bool) -> str:
    """That the hub gave this name in that round; whether it made it up, or the user chose it."""
    return f"{MANIFESTS}{name}/{round_number}.{'made' if made else 'chosen'}"


class Trace(NamedTuple):
    """What the key of a manifest, or of a note beside it, tells."""

    name: str
    round: int
    kind: str
    """'json' for a manifest, 'made' or 'chosen' for a note."""


def read_trace(key: str) -> Trace | None:
    """What that key tells; None for one that is neither a manifest's nor a note's."""
    found = _TRACE.fullmatch(key)
    return Trace(found[1], int(found[2]), found[3]) if found else None


_TRACE = re.compile(re.escape(MANIFESTS) + r"(.+)/(\d+)(?:-\d+)?\.(json|made|chosen)")


def failure(round_number: int, rank: int) -> str:
    """The sealed pickle of a rank's exception."""
    return f".spotfit/failures/{round_number}-{rank}.pkl"


def machine_failure(agent: AgentId) -> str:
    """The sealed pickle of what keeps an agent's machine from starting any worker."""
    return f".spotfit/failures/{agent}.pkl"


def hook_failure(sha256: str) -> str:
    """The sealed pickle of what a callback or a hook raised, by its hash."""
    return f".spotfit/failures/hook-{sha256}.pkl"


def result(round_number: int, rank: int) -> str:
    """The sealed pickle of what a rank's function returned."""
    return f".spotfit/results/{round_number}-{rank}.pkl"


def stacks(agent: AgentId, round_number: int, n: int) -> str:
    """What the workers of a round were doing when it was looked into for the n-th time."""
    return f".spotfit/stacks/{agent}-{round_number}-{n}.txt"


def reports(agent: AgentId, n: int) -> str:
    """A chunk of metrics, one JSON object a line."""
    return f".spotfit/reports/{agent}/{n:08d}.jsonl"


def logs(agent: AgentId, n: int) -> str:
    """A chunk of the output of one node's workers, one JSON object a line."""
    return f".spotfit/logs/{agent}/{n:08d}.jsonl"

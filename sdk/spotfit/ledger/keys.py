"""The object keys below a run's root: their format, their kind and their writer.

A key is *immutable* (created once, never changed) or *single-writer* (overwritten by one process).
No object is read, modified and written back (docs/decisions/0002).

    key                                              kind           writer
    <checkpoint name>/…                              immutable      every rank that saved files
    .spotfit/journal/<slot>.json                     immutable      the process that wins the slot
    .spotfit/views/<slot>.json                       immutable      the leader
    .spotfit/leases/<agent>                          single-writer  that agent, while it leads
    .spotfit/members/<agent>.json                    single-writer  that agent
    .spotfit/fn/<sha256>.pkl                         immutable      the client
    .spotfit/code/<sha256>.tar.gz                    immutable      the client
    .spotfit/manifests/<name>/<round>-<rank>.json    immutable      that rank
    .spotfit/manifests/<name>/<round>.<kind>         immutable      the leader: 'made' or 'chosen'
    .spotfit/refs/<folder>/<name>/<round>-<rank>     immutable      that rank, see `checkpoint_ref`
    .spotfit/failures/<round>-<rank>.pkl             single-writer  the agent of that rank
    .spotfit/failures/<agent>.pkl                    single-writer  that agent, see `agent_failure`
    .spotfit/failures/hook-<sha256>.pkl              immutable      the callback sidecar
    .spotfit/results/<round>-<rank>.pkl              single-writer  the agent of that rank
    .spotfit/reports/<agent>/<n>.jsonl               immutable      that agent, while it leads
    .spotfit/stacks/<agent>-<round>-<n>.txt          immutable      that agent, while it leads
    .spotfit/logs/<agent>/<n>.jsonl                  immutable      that agent

`format_log_source` names the source of a log line: a rank, or one of the pseudo-ranks.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from spotfit.core.ids import AgentId

# Checkpoint names start with a letter or digit (`core.ids.parse_name`), so they cannot collide with
# it.
RESERVED_PREFIX = ".spotfit/"
JOURNAL = ".spotfit/journal/"
VIEWS = ".spotfit/views/"
MEMBERS = ".spotfit/members/"
MANIFESTS = ".spotfit/manifests/"
REFS = ".spotfit/refs/"


def entry(slot: int) -> str:
    """The journal entry of that slot."""
    # 20 digits, so that the lexicographic order of a bucket listing is the order of the slots.
    return f"{JOURNAL}{slot:020d}.json"


def cached_view(slot: int) -> str:
    """The cached view of all entries before that slot."""
    return f"{VIEWS}{slot:020d}.json"


def lease(agent: AgentId) -> str:
    """The lease of a leader: a counter that it increments while it is alive."""
    return f".spotfit/leases/{agent}"


def member(agent: AgentId) -> str:
    """The `Member` of an agent."""
    return f"{MEMBERS}{agent}.json"


def manifest(name: str, round_number: int, rank: int) -> str:
    """The manifest of the files that one rank saved for a checkpoint."""
    return f"{MANIFESTS}{name}/{round_number}-{rank}.json"


class CheckpointRef(NamedTuple):
    """A rank's shard of a checkpoint that references files in the folder of another checkpoint."""

    name: str
    round: int
    rank: int


def checkpoint_ref(folder: str, name: str, round_number: int, rank: int) -> str:
    """A marker that the rank's manifest of `name` references files in `folder`.

    Incremental checkpoints reference unchanged files of earlier ones; garbage collection must not
    delete a folder that has such markers.
    """
    return f"{REFS}{folder}/{name}/{round_number}-{rank}"


def parse_checkpoint_ref(key: str, folder: str) -> CheckpointRef | None:
    """Parse a key made by `checkpoint_ref` for that folder; None for any other key."""
    match = _CHECKPOINT_REF.fullmatch(key.removeprefix(f"{REFS}{folder}/"))
    return CheckpointRef(match[1], int(match[2]), int(match[3])) if match else None


_CHECKPOINT_REF = re.compile(r"([^/]+)/(\d+)-(\d+)")


def name_marker(name: str, round_number: int, *, generated: bool) -> str:
    """A marker that the checkpoint name was assigned in that round.

    `generated`: spotfit generated the name; otherwise user code chose it.
    """
    return f"{MANIFESTS}{name}/{round_number}.{'made' if generated else 'chosen'}"


class ManifestKey(NamedTuple):
    """The parsed key of a manifest or of a name marker."""

    name: str
    round: int
    kind: str
    """'json' for a manifest, 'made' (generated) or 'chosen' for a name marker."""


def parse_manifest_key(key: str) -> ManifestKey | None:
    """Parse a key made by `manifest` or `name_marker`; None for any other key."""
    match = _MANIFEST_KEY.fullmatch(key)
    return ManifestKey(match[1], int(match[2]), match[3]) if match else None


_MANIFEST_KEY = re.compile(re.escape(MANIFESTS) + r"(.+)/(\d+)(?:-\d+)?\.(json|made|chosen)")


def failure(round_number: int, rank: int) -> str:
    """The sealed pickle of a rank's exception."""
    return f".spotfit/failures/{round_number}-{rank}.pkl"


def agent_failure(agent: AgentId) -> str:
    """The sealed pickle of the error because of which an agent's node can start no worker."""
    return f".spotfit/failures/{agent}.pkl"


def hook_failure(sha256: str) -> str:
    """The sealed pickle of an exception raised by a callback or hook, by its hash."""
    return f".spotfit/failures/hook-{sha256}.pkl"


def result(round_number: int, rank: int) -> str:
    """The sealed pickle of the return value of a rank's training function."""
    return f".spotfit/results/{round_number}-{rank}.pkl"


def stack_dump(agent: AgentId, round_number: int, index: int) -> str:
    """The stacks of all workers of a round, collected for its n-th suspected hang."""
    return f".spotfit/stacks/{agent}-{round_number}-{index}.txt"


def reports(agent: AgentId, index: int) -> str:
    """A chunk of reported metrics, one JSON object per line."""
    return f".spotfit/reports/{agent}/{index:08d}.jsonl"


def logs(agent: AgentId, index: int) -> str:
    """A chunk of the output of one node's workers, one JSON object per line."""
    return f".spotfit/logs/{agent}/{index:08d}.jsonl"


# Pseudo-ranks of log lines that do not come from a worker.
SIDECAR_RANK = -1
"""Callbacks and backend hooks."""
RUN_RANK = -2
"""The agent itself."""
VALIDATION_RANK = -3
"""A validation."""

_SOURCE_NAMES = {SIDECAR_RANK: "sidecar", RUN_RANK: "run", VALIDATION_RANK: "validation"}


def format_log_source(rank: int) -> str:
    """The name of a log line's source as it is displayed."""
    return _SOURCE_NAMES.get(rank, f"rank {rank}")

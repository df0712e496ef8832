"""The object keys below a run's root: their format, their kind and their writer.

A key is *immutable* (created once, never changed) or *single-writer* (overwritten by one process).
No object is read, modified and written back (docs/decisions/0002).

    key                                              kind           writer
    <checkpoint name>/…                              immutable      every rank that saved files
    .spotfit/journal/<slot>.json                     immutable      the process that wins the slot
    .spotfit/views/<slot>.json                       immutable      the leader
    .spotfit/leases/<agent>                          single-writer  that agent, while it leads
    .spotfit/members/<agent>.json                    single-writer  that agent
    .spotfit/standby/<token>/<agent>.json            single-writer  that agent, while it stands by
    .spotfit/crashes/<token>-<node>.json             single-writer  the agent of that machine
    .spotfit/fn/<sha256>.pkl                         immutable      the client
    .spotfit/code/<sha256>.tar.gz                    immutable      the client
    .spotfit/data/<sha256>.arrow                     immutable      the client
    .spotfit/metadata/<sha256>.json                  immutable      the client
    .spotfit/manifests/<name>/<round>-<rank>.json    immutable      that rank
    .spotfit/manifests/<name>/<round>.<kind>         immutable      the leader: 'made' or 'chosen'
    .spotfit/refs/<folder>/<name>/<round>-<rank>     immutable      that rank, see `checkpoint_ref`
    .spotfit/failures/<round>-<rank>.pkl             single-writer  the agent of that rank
    .spotfit/failures/<agent>.pkl                    single-writer  that agent, see `agent_failure`
    .spotfit/failures/hook-<sha256>.pkl              immutable      a callbacks or hooks sidecar
    .spotfit/results/<round>-<rank>.pkl              single-writer  the agent of that rank
    .spotfit/reports/<agent>/<n>.jsonl               immutable      that agent, while it leads
    .spotfit/callbacks/<agent>.json                  single-writer  that agent, while it leads
    .spotfit/stacks/<agent>-<round>-<n>.txt          immutable      that agent, while it leads
    .spotfit/logs/<agent>/<n>.jsonl                  immutable      that agent

`format_log_source` names the source of a log line: a rank, or one of the pseudo-ranks.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from spotfit.core.ids import AgentId, Token

# Checkpoint names start with a letter or digit (`core.ids.parse_name`), so they cannot collide with
# it.
RESERVED_PREFIX = ".spotfit/"
JOURNAL = ".spotfit/journal/"
VIEWS = ".spotfit/views/"
LEASES = ".spotfit/leases/"
MEMBERS = ".spotfit/members/"
STANDBY = ".spotfit/standby/"
CRASHES = ".spotfit/crashes/"
MANIFESTS = ".spotfit/manifests/"
REFS = ".spotfit/refs/"
REPORTS = ".spotfit/reports/"
CALLBACKS = ".spotfit/callbacks/"
_METADATA = ".spotfit/metadata/"


_ENTRY = re.compile(re.escape(JOURNAL) + r"\d{20}\.json")


def is_entry(key: str) -> bool:
    """Whether the key is that of a journal entry; other tools may leave files beside them."""
    return _ENTRY.fullmatch(key) is not None


def entry(slot: int) -> str:
    """Return the object key of the journal entry in `slot`, counted from 0.

    Like all keys of this module it is relative to the run's root. Example:
    ".spotfit/journal/00000000000000000042.json".
    """
    # 20 digits, so that the lexicographic order of a bucket listing is the order of the slots.
    return f"{JOURNAL}{slot:020d}.json"


def cached_view(slot: int) -> str:
    """Return the object key of the cached view of the journal entries before `slot`.

    The leader creates it, see `ledger.journal.write_cached_view`.
    """
    return f"{VIEWS}{slot:020d}.json"


def lease(agent: AgentId) -> str:
    """Return the object key of an agent's lease: a decimal counter, incremented while it leads.

    Overwritten only by that agent. Other processes read it to detect that the leader is lost.
    """
    return f"{LEASES}{agent}"


def member(agent: AgentId) -> str:
    """Return the object key of an agent's `Member` as JSON: its addresses and worker slots.

    Overwritten only by that agent; kept after the agent has ended, so that its logs can be found.
    """
    return f"{MEMBERS}{agent}.json"


def standby(token: Token, agent: AgentId) -> str:
    """Return the object key of the `StandbyReport` of an agent, as JSON.

    `token` is that of the group of its machine: the leader reads the reports of one group.
    """
    return f"{STANDBY}{token}/{agent}.json"


def crash(token: Token, node: int) -> str:
    """Return the object key of the `AgentCrash` of a machine, as JSON.

    `token` is that of its group, `node` the index in it. Named after the machine, because the
    leader may not know an agent that crashed before it joined. Written by the agent that crashes; a
    later agent of a restarted machine overwrites it.
    """
    return f"{CRASHES}{token}-{node}.json"


def manifest(name: str, round_number: int, rank: int) -> str:
    """Return the object key of the JSON list of files that one rank saved for a checkpoint.

    `name` is the checkpoint's unique name, `round_number` the round that saved it and `rank` a
    world rank. Example: ".spotfit/manifests/step-500/3-0.json". Created by that rank after its
    files.
    """
    return f"{MANIFESTS}{name}/{round_number}-{rank}.json"


def default_metadata(sha256: str) -> str:
    """Return the object key of the metadata that every checkpoint of a fit has by default.

    `sha256` is the hex digest of the object. The client creates it before the fit starts.
    """
    return f"{_METADATA}{sha256}.json"


class CheckpointRef(NamedTuple):
    """A rank's shard of checkpoint `name` that lists files in a folder other than `name`.

    Parsed from a key by `parse_checkpoint_ref`; `round` and `rank` are those of its manifest.
    """

    name: str
    round: int
    rank: int
    folder: str


def checkpoint_ref(folder: str, name: str, round_number: int, rank: int) -> str:
    """Return the object key of a marker that a rank's manifest of `name` lists files in `folder`.

    Incremental checkpoints list unchanged files in the folder of an earlier checkpoint. Garbage
    collection keeps files that a manifest with such a marker lists. The object is empty; the rank
    creates it before its manifest.
    """
    return f"{REFS}{folder}/{name}/{round_number}-{rank}"


def parse_checkpoint_ref(key: str) -> CheckpointRef | None:
    """Parse a key made by `checkpoint_ref`; return None for any other key.

    Called by garbage collection with the keys of a listing.
    """
    match = _CHECKPOINT_REF.fullmatch(key)
    return CheckpointRef(match[2], int(match[3]), int(match[4]), match[1]) if match else None


_CHECKPOINT_REF = re.compile(re.escape(REFS) + r"(.+)/([^/]+)/(\d+)-(\d+)")


def name_marker(name: str, round_number: int, *, generated: bool) -> str:
    """Return the object key of a marker that the checkpoint name was assigned in that round.

    `generated` is True if spotfit generated the name and False if user code chose it. The object
    has no content. The leader writes it when the name is assigned, so that a later leader finds
    files that were uploaded without a manifest. Example: ".spotfit/manifests/step-500/3.made".
    """
    return f"{MANIFESTS}{name}/{round_number}.{'made' if generated else 'chosen'}"


class ManifestKey(NamedTuple):
    """The parsed key of a manifest or of a name marker."""

    name: str
    round: int
    kind: str
    """'json' for a manifest, 'made' (generated) or 'chosen' for a name marker."""


def parse_manifest_key(key: str) -> ManifestKey | None:
    """Parse a key made by `manifest` or `name_marker`; return None for any other key.

    Called with the keys of a listing of `MANIFESTS`; does not access the store.
    """
    match = _MANIFEST_KEY.fullmatch(key)
    return ManifestKey(match[1], int(match[2]), match[3]) if match else None


_MANIFEST_KEY = re.compile(re.escape(MANIFESTS) + r"(.+)/(\d+)(?:-\d+)?\.(json|made|chosen)")


def failure(round_number: int, rank: int) -> str:
    """Return the object key of the exception that a world rank raised in that round.

    The object is a sealed pickle: encrypted and authenticated with the run's key. The agent of that
    rank writes it; the client and the callback sidecar load it.
    """
    return f".spotfit/failures/{round_number}-{rank}.pkl"


def agent_failure(agent: AgentId) -> str:
    """Return the object key of the error because of which an agent's node can start no worker.

    The object is a sealed pickle (see `failure`), written by that agent.
    """
    return f".spotfit/failures/{agent}.pkl"


def hook_failure(sha256: str) -> str:
    """Return the object key of an exception raised by a callback or backend hook in a sidecar.

    `sha256` is the hex digest of the pickled exception, so that a repeated one is stored once. The
    object is a sealed pickle (see `failure`).
    """
    return f".spotfit/failures/hook-{sha256}.pkl"


def result(round_number: int, rank: int) -> str:
    """Return the object key of the return value of a world rank's training function.

    The object is a sealed pickle (see `failure`), written by the agent of that rank. `fit()`
    returns the one of rank 0 in the last round.
    """
    return f".spotfit/results/{round_number}-{rank}.pkl"


def stack_dump(agent: AgentId, round_number: int, index: int) -> str:
    """Return the object key of the stacks of all workers of a round, as text.

    `agent` is the leader that collected them; `index` counts suspected hangs of the round from 1.
    """
    return f".spotfit/stacks/{agent}-{round_number}-{index}.txt"


def reports(agent: AgentId, index: int) -> str:
    """Return the object key of a chunk of metrics that the leader has matched, as JSON lines.

    `agent` is that leader; `index` counts its chunks from 0 over all rounds.
    """
    return f"{REPORTS}{agent}/{index:08d}.jsonl"


def callback_progress(agent: AgentId) -> str:
    """Return the object key of the last report whose callbacks have returned on this leader."""
    return f"{CALLBACKS}{agent}.json"


def logs(agent: AgentId, index: int) -> str:
    """Return the object key of a chunk of the output of one node, one JSON object per line.

    `index` counts the chunks of that agent from 0; read them until one is missing.
    """
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
    """Return the displayed source of a log line: "rank 3" for a world rank, or a name like "run".

    The pseudo-ranks are `SIDECAR_RANK` ("sidecar"), `RUN_RANK` ("run") and `VALIDATION_RANK`
    ("validation"). Called by the console output of `fit()` and `spotfit logs`.
    """
    return _SOURCE_NAMES.get(rank, f"rank {rank}")

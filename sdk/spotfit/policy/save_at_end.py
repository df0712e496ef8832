"""Whether the snapshots that ranks take after the training function has returned are a checkpoint.

A rank takes its snapshot without waiting for the others, which may still train, or may have
returned at another step. The leader decides once all ranks have returned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

import msgspec

from spotfit.core.units import format_ranks
from spotfit.model.reporting import SaveAtEnd


class CommitSnapshots(msgspec.Struct, frozen=True, kw_only=True):
    """The snapshots of all ranks are one training state, of this step."""

    step: int


class NothingUnsaved(msgspec.Struct, frozen=True, kw_only=True):
    """All steps are in a snapshot or in reported files, or no rank saves at the end."""


class StepsUnsaved(msgspec.Struct, frozen=True, kw_only=True):
    """The last steps are in no checkpoint; `reason` is shown to users."""

    reason: str


_REMEDY = (
    "To keep them, call Checkpointer.save() on all ranks after the last step that all ranks make"
)

SaveAtEndDecision = CommitSnapshots | NothingUnsaved | StepsUnsaved


def decide_save_at_end(
    ends: Mapping[int, SaveAtEnd], *, world_size: int, lost_ranks: AbstractSet[int] = frozenset()
) -> SaveAtEndDecision:
    """Return what becomes of the snapshots of a round whose ranks have all returned. Pure.

    `ends` has the ranks with a Checkpointer that saves at the end, `lost_ranks` those whose node
    has disconnected. Files that any rank reported after its last step are the user's final
    checkpoint, which a snapshot would replace.
    """
    is_saved = all(end.step <= end.saved_step for end in ends.values())
    if is_saved or any(end.has_newer_files for end in ends.values()):
        return NothingUnsaved()
    disagreement = _find_disagreement(ends, world_size=world_size, lost_ranks=lost_ranks)
    if not disagreement:
        return CommitSnapshots(step=max(end.step for end in ends.values()))
    saved_step = max(end.saved_step for end in ends.values())
    unsaved = f"the steps after {saved_step} are" if saved_step else "the last steps are"
    return StepsUnsaved(reason=f"{disagreement}; {unsaved} in no checkpoint. {_REMEDY}")


def _find_disagreement(
    ends: Mapping[int, SaveAtEnd], *, world_size: int, lost_ranks: AbstractSet[int]
) -> str:
    """Return why the snapshots of these ranks are not one training state; '' if they are."""
    ranks_by_step: dict[int, list[int]] = defaultdict(list)
    ranks_by_error: dict[str, list[int]] = defaultdict(list)
    for rank, end in sorted(ends.items()):
        ranks_by_step[end.step].append(rank)
        if end.error:
            ranks_by_error[end.error].append(rank)
    if len(ranks_by_step) > 1:
        first, *others = ranks_by_step.items()
        texts = [f"{format_ranks(ranks)} at step {step}" for step, ranks in others]
        return ", ".join([f"{format_ranks(first[1])} ended at step {first[0]}", *texts])
    if ranks_by_error:
        return "; ".join(
            f"{format_ranks(ranks)} could not save at the end: {error}"
            for error, ranks in ranks_by_error.items()
        )
    if missing := set(range(world_size)).difference(ends):
        return f"{format_ranks(missing)} had no Checkpointer that saves at the end"
    if lost_ranks:
        return f"the node of {format_ranks(lost_ranks)} was lost before the last steps were saved"
    if without := [rank for rank, end in ends.items() if not end.has_snapshot]:
        return f"{format_ranks(without)} took no snapshot"
    if len({end.save_number for end in ends.values()}) > 1:
        return "the ranks have saved a different number of times"
    if len({end.state_digest for end in ends.values()}) > 1:
        return "the ranks ended with different weights or optimizer options"
    return ""

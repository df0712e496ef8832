"""What becomes of the snapshots that ranks take after the training function has returned."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spotfit.model.reporting import SaveAtEnd
from spotfit.policy.save_at_end import (
    CommitSnapshots,
    NothingUnsaved,
    StepsUnsaved,
    decide_save_at_end,
)

END = SaveAtEnd(step=40, saved_step=30, save_number=4, has_snapshot=True, state_digest="d")


def test_snapshots_of_one_step_are_committed() -> None:
    assert decide_save_at_end({0: END, 1: END}, world_size=2) == CommitSnapshots(step=40)


@pytest.mark.parametrize(
    "ends",
    [
        {},
        {0: replace(END, saved_step=40), 1: replace(END, saved_step=40)},
        {0: replace(END, has_newer_files=True), 1: END},
        {0: replace(END, has_newer_files=True), 1: replace(END, step=38)},
    ],
    ids=["no Checkpointer", "saved", "files of one rank", "files, and uneven"],
)
def test_nothing_is_unsaved_after_a_save_or_a_report_with_files(ends: dict[int, SaveAtEnd]) -> None:
    assert decide_save_at_end(ends, world_size=2) == NothingUnsaved()


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (replace(END, step=38), "ranks 0, 1 ended at step 40, rank 2 at step 38"),
        (
            replace(END, step=30, has_snapshot=False),
            "ranks 0, 1 ended at step 40, rank 2 at step 30",
        ),
        (
            replace(END, error="no space", has_snapshot=False),
            "rank 2 could not save at the end: no space",
        ),
        (replace(END, has_snapshot=False), "rank 2 took no snapshot"),
        (replace(END, save_number=5), "the ranks have saved a different number of times"),
        (
            replace(END, state_digest="e"),
            "the ranks ended with different weights or optimizer options",
        ),
    ],
)
def test_snapshots_that_are_not_one_state_are_unsaved_with_the_numbers(
    other: SaveAtEnd, reason: str
) -> None:
    decision = decide_save_at_end({0: END, 1: END, 2: other}, world_size=3)
    assert isinstance(decision, StepsUnsaved)
    assert decision.reason.startswith(f"{reason}; the steps after 30 are in no checkpoint. ")
    assert "call Checkpointer.save()" in decision.reason


def test_a_rank_without_a_snapshot_is_named() -> None:
    decision = decide_save_at_end({0: replace(END, saved_step=0)}, world_size=2)
    assert decision == StepsUnsaved(
        reason="rank 1 had no Checkpointer that saves at the end; the last steps are in no "
        "checkpoint. To keep them, call Checkpointer.save() on all ranks after the last step that "
        "all ranks make"
    )


def test_a_lost_node_leaves_steps_unsaved() -> None:
    decision = decide_save_at_end({0: END, 1: END}, world_size=2, lost_ranks={1})
    assert isinstance(decision, StepsUnsaved)
    assert "the node of rank 1 was lost" in decision.reason

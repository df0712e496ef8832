"""Loading of a saved state without the other ranks."""

from __future__ import annotations

from spotfit.checkpoint.reader import SavedState, read_chunks
from spotfit.torch.checkpoint.load_plan import StateLoadPlan
from spotfit.torch.checkpoint.training_state import StateDict


def load_state(state: StateDict, saved: SavedState) -> None:
    """Overwrite every tensor and value of `state` with what was saved."""
    read_chunks(StateLoadPlan(state, saved).reads)

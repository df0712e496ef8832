"""Checkpointer for PyTorch: plans, copies, validates and restores the complete training state.

It must not know where snapshots are stored or uploaded; `spotfit.checkpoint` does that.
"""

"""Checkpointer for PyTorch: plans, copies, validates and restores the complete training state.

Storing and uploading snapshots is the responsibility of `spotfit.checkpoint`.
"""

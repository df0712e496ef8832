"""Bytes: objects by key, wherever they lie.

This room knows nothing of runs, journals or checkpoints; it may not import the rooms above it.
"""

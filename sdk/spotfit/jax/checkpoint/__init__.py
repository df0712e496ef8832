"""Checkpointer for JAX: saves and restores pytrees of arrays, also those sharded over processes.

Storing and uploading snapshots is the responsibility of `spotfit.checkpoint`.
"""

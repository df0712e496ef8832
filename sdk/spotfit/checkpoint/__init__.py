"""Checkpoints and snapshots: their format, upload, commit data, replication, restore and deletion.

This package must not know training frameworks, and does not decide what is retained or when a
round is opened or closed.
"""

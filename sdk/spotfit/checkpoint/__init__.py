"""Checkpoints and snapshots: their format, upload, commit data, replication, restore and deletion.

This package does not depend on training frameworks, and does not decide what is retained or when a
round is opened or closed.
"""

"""Object storage: one interface to S3, GCS, Azure, local directories and memory.

This package must not know runs, journals or checkpoints, and imports no package above it.
"""

"""Fault injection and reference training jobs for runs of real processes.

The package must not import the virtual-time simulator, and reads no state of an agent but its
bucket.
"""

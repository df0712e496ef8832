"""Immutable data types of a run: configuration, journal events, and the view folded from them.

This package makes no decisions, performs no I/O and reads no clock; it imports only `core`.
"""

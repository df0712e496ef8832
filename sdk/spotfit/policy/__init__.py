"""Decisions of the leader as pure functions of `View`, `LeaderState` and `now`, with their reasons.

This package performs no I/O and has no access to clocks, randomness or the network (import
contract).
"""

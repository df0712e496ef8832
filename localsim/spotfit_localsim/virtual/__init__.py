"""Deterministic simulation of whole runs: the production agent under a virtual clock.

The package must not start a process, open a socket or read a real clock.
"""

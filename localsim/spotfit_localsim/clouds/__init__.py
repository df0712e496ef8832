"""Simulated clouds: HTTP servers on loopback that the real client libraries of the clouds talk to.

The package starts the agent as a real process and must not know about runs, journals or
checkpoints.
"""

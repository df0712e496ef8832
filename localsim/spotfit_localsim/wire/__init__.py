"""Clouds on loopback: servers that the unmodified clients of the real clouds talk to.

They know nothing of runs and journals; what they start is the real agent in a real process.
"""

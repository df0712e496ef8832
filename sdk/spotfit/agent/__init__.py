"""The body: one agent a node, which joins rounds, starts workers and outlives their sins.

This room imports no framework and never runs the user's code in its own process.
"""

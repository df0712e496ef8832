"""Judgement: pure functions from facts and `now` to a verdict and its reason.

This room has no clock, no dice and no wires; a contract forbids it even to import them.
"""

"""Notice sources: each detects preemption notices of one kind of machine.

A source must only know its own machine, not rounds, the journal or the reaction to a notice.
"""

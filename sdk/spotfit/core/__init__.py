"""Words: the pure vocabulary of spotfit (errors, names, units, encodings).

This room imports nothing of ours and touches nothing: no clock, no dice, no files, no network.
"""

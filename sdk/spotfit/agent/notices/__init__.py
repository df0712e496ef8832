"""Notice sources: how each kind of machine learns that it will be taken away.

A source knows only its own machine; nothing of rounds, journals or what will be done about it.
"""

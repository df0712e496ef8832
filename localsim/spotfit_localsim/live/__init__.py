"""Real nodes on this machine: every agent a process group, every reclaim a real signal.

It pretends nothing but the cloud; agents, stores and clocks are the real ones.
"""

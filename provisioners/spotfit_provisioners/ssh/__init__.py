"""SSH backend: a group is one agent on each of its hosts, a fixed list of Linux machines.

It must not keep state on the caller's machine: the hosts' state directories are authoritative.
"""

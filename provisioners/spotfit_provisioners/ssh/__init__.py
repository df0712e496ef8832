"""Machines one already has, by OpenSSH: a group is an agent on each of some hosts."""

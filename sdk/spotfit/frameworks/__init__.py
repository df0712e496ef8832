"""Adapters that give each training library its ranks, devices, rendezvous and process group.

This package is independent of agents, the journal, provisioners and the storage of checkpoints.
"""

"""Adapters that give each training library its ranks, devices, rendezvous and process group.

This package must not know agents, the journal, provisioners or how checkpoints are stored.
"""

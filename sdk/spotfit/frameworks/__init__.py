"""Dialects: how each training library is told who it is and whom to meet.

This room knows places and worlds, but no agent, no journal and no cloud.
"""

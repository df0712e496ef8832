"""Adapter for PyTorch: process groups for torch, torchft and torch_xla, and their configurations.

It is independent of agents, the journal and clouds, and imports torch only inside functions.
"""

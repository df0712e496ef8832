"""Adapter for PyTorch: process groups for torch, torchft and torch_xla, and their configurations.

It must not know agents, the journal or clouds, and it imports torch only inside functions.
"""

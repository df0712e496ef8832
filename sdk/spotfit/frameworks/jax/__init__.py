"""The framework of JAX: one distributed runtime over the processes of all ranks in every round.

Importing this package does not import jax.
"""

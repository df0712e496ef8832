"""Iteration over a dataset: passes, batches and positions."""

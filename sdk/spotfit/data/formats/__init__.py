"""Blocks as NumPy arrays, DataFrames, Arrow tables and tensors, and back."""

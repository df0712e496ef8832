"""Rows of a dataset and the transforms on them, without the methods of `Dataset`."""

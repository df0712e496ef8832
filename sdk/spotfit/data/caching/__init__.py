"""Rows that are computed once on a machine and kept there."""

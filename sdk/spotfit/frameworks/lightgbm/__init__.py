"""The framework of LightGBM: the list of machines that its processes connect to in every round.

Importing this package does not import lightgbm.
"""

"""The framework of XGBoost: its tracker and communicator, formed in every round.

Importing this package does not import xgboost.
"""

"""Facts: frozen data about a run, and how the journal folds into one view of it.

This room decides nothing and touches nothing; it imports only words from `core`.
"""

"""`python -m spotfit.migrate`: rewrites the imports of Ray Train scripts and reports manual work.

It works on source text, starts nothing, and must not import Ray or the user's script.
"""

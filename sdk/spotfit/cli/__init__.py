"""A window for hands: the `spotfit` command.

This room decides nothing and keeps nothing; it asks the client and prints the answer.
"""

"""The `spotfit` command: parses arguments, calls `client` and `provision`, prints the result.

It must not contain decisions or state of its own.
"""

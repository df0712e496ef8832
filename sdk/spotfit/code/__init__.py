"""Packaging of the user's function, code and runtime environment, and loading it on the machines.

This package must not know which process calls the function: no agents, frameworks or policies.
"""

"""Kubernetes backend: a group is an indexed Job on spot nodes, with one pod per machine.

It must not import classes of the client library for responses: they take a second to import.
"""

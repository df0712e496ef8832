"""Executes the decisions of `policy`: appends to the journal and calls the provisioner.

This package makes no decisions itself and calls clouds only through the `Provisioner` protocol.
"""

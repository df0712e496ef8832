"""Prices that several backends need: those given by the user, and a cache of those of the clouds.

This package must not know a backend, import a client library, or use the network.
"""

"""Simulators for development and tests: real processes on this machine, or virtual time.

The package runs the code of the SDK and may import all of it; the SDK must not import this package.
"""

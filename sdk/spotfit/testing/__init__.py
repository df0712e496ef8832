"""Conformance suites and fakes, shipped so that third parties can test their own parts.

Nothing outside this room may import it, and it imports no test framework of its own accord.
"""

"""The persistent state of a run in its bucket: the journal, cached views, leases and object keys.

This package makes no decisions and starts nothing; it depends neither on machines nor on user code.
"""

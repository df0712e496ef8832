"""The provisioner interface: plan, submit, observe and cancel groups of machines on a backend.

This package must not import a backend, nor know about buckets, the journal or scheduling policies.
"""

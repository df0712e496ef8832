"""Conformance suites, fakes and test data builders, also for third-party stores and provisioners.

Product code must not import it, and only the provisioner suite imports pytest.
"""

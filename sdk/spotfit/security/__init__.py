"""The run key and what is derived from it: encryption, signatures and TLS certificates.

This package must not know what the protected bytes mean, or where they are stored or sent.
"""

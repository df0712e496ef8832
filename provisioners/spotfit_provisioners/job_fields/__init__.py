"""Values of job request fields that several backends need: resource counts, images and labels.

This package must not know a backend, import a client library, or use the network.
"""

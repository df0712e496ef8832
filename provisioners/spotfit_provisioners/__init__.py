"""Provisioner backends, one subpackage each, that translate group requests to a cloud's API.

It imports only `core`, `host`, `model` and `provision` of spotfit; no backend imports another one.
"""

"""Kubernetes: a group is an indexed Job on spot nodes, its machines are pods."""

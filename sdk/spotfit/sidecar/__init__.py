"""Processes beside the workers of a node: callbacks, backend hooks, uploader and validator.

The agent's side (`callbacks`, `backend_hooks`, `uploader`, `validator`) must not import the
`*_process` modules, which load the user's code.
"""

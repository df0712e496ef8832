"""Access to the local machine: environment, clock, randomness, processes, logging and plugins.

It must not know runs, object stores or clouds, and imports only `core`.
"""

"""Local backend: every node is an agent process of this machine with a directory and an address.

It must not depend on the simulators of `spotfit_localsim`.
"""

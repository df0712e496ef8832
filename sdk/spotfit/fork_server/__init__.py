"""A single-threaded process (a "zygote") that has imported the framework and forks user processes.

It must not know what its children execute: it starts them by the dotted name of a module.
"""

"""A world to train in without a cloud: real processes on this machine, or a virtual clock.

It may see everything, because it runs the real code; nothing in the sdk may know it.
"""

"""This machine: the only room that reads the environment, a clock, dice, hardware or plugins.

It knows nothing of runs, buckets or clouds; it may import `core` and nothing else of ours.
"""

"""Slurm backend: a group is an array job with one single-node task per machine.

It must not need anything but Slurm's commands, since agents submit replacements from the nodes.
"""

"""Slurm, by its commands: a group is an array job, its machines are tasks of one node each."""

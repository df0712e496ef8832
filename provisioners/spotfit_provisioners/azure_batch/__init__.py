"""Azure Batch: a group is a job with one plain task for each machine, in a pool of spot nodes.

A task is a machine's identity: Batch gives a node that was preempted its old id again, and tells of
it as `preempted` or `unusable` meanwhile.
"""

"""Azure Batch backend: a group is a job with one task per machine, in a pool of spot nodes.

It must identify machines by their tasks, not by nodes: Batch reuses the id of a preempted node.
"""

"""Google Cloud Batch backend: a group is a job with one task per machine, on Spot VMs.

It must not derive the state of a task from exit codes in its events: these remain after a retry.
"""

"""Google Cloud Batch: a group is a job with one task for each machine, on Spot VMs.

A task's state is trusted, never the exit codes among its events: those stay after a retry that went
well, and come in no order.
"""

"""AWS Batch: a group is a job, an array of them if it has several machines, on spot instances.

Never multi-node-parallel jobs: they are accepted on spot and wait for ever.
"""

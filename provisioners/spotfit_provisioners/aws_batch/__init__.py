"""AWS Batch backend: a group is a job on spot instances, an array job if it has several machines.

It must not use multi-node parallel jobs: AWS accepts them on spot queues but never starts them.
"""

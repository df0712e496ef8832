"""SkyPilot backend: a group is one managed job, or one single-node cluster, per machine.

It must not use jobs with several nodes: their recovery restarts healthy machines with the lost one.
"""

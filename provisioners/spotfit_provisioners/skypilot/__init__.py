"""SkyPilot: a group is a managed job, or a cluster, for each of its machines.

Never one of several nodes: its recovery would take healthy machines down with the lost one.
"""

"""The agent of a node: it joins rounds, runs their workers and, if elected, leads the run.

It must not import a machine-learning framework or execute user code in its own process.
"""

"""The torch dialect: process group, model, data loader and device of one worker.

It knows its own place in the round, but no agent, no journal and no cloud.
"""

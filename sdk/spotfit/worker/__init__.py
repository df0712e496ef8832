"""The guest's room: what runs inside the user's process, next to the user's function.

This room never imports the agent: the two speak frames over a pipe, and nothing else.
"""

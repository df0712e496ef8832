"""Code that runs inside a worker process, next to the user's training function.

It must not import the agent: the two processes share only the messages of `spotfit.protocol`.
"""

"""Messages that processes of a run send each other, one module per conversation.

It imports only core and model, and performs no I/O except for splitting byte streams into frames.
"""

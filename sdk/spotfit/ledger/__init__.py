"""Memory: the run as objects in its bucket, with the journal as the one truth.

This room decides nothing and starts nothing; it knows neither machines nor the user's code.
"""

"""Loading: the rows of one rank, step by step."""

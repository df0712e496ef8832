"""One program a side: each reads a job, and does the same work its own way."""

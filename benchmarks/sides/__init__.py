"""One program per side; each executes the same job with its own library."""

"""Pure vocabulary of spotfit: errors, identifiers, units, input checks and the JSON encoding.

It imports no other spotfit package and reads no clock, random source, file or network.
"""

"""What several clouds need to say the same thing in their own words.

It knows no cloud, no client library and no network.
"""

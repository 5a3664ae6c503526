"""Raw text to a dataset artifact: a token stream and row tables over it.

Both are persisted, checksummed and named by key.
"""

"""The chunk level of a dataset: row tables over the token stream."""

"""Row tables over the token stream of a dataset."""

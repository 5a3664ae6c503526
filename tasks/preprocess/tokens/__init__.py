"""The token level of a dataset: parts of the text, units, selection, shards, reader."""

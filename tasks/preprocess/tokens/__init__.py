"""The token level of a dataset: plan, journal, shards, reader."""

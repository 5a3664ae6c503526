"""Strategies that distribute a model over the ranks, and optimizers."""

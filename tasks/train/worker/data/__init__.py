"""Rows of the dataset that a rank sees at a step."""

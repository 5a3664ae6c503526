"""Verification of a dataset against its manifest, before anything is trained on it."""

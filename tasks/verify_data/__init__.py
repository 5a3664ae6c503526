"""Whether a dataset is what its manifest says, before anything is trained on it."""

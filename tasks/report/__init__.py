"""Pages and tables for people: what a run or a dataset is, from the files that it left. Imports no torch."""

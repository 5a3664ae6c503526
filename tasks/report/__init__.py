"""HTML pages and Markdown cards of runs and datasets, from their files. Imports no torch."""

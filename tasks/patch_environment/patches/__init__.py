"""Known faults of other people's code, mended in a worker's process while it lives; nothing on disk is changed."""

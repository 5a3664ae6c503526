"""Known faults of other packages, fixed in a worker's process while it runs; nothing on disk is changed."""

"""Facts of the machine, what a run should use of it, and the environment variables of its workers; nothing outlives the run."""

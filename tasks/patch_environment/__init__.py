"""Facts of the machine, what a run should use of it, and the environment of its workers.

Nothing outlives the run.
"""

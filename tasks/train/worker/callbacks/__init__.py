"""Callbacks: everything that is done after a step, beside the step itself."""

"""The estimate of a run before anything starts: parameters, arithmetic, memory."""

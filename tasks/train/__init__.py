"""The training stage: a supervisor without torch (this folder), and the workers (worker/)."""

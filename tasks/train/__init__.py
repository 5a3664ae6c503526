"""The training stage: a supervisor that needs no torch (this folder) and the torchrun workers (worker/)."""

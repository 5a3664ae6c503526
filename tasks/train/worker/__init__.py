"""What torchrun runs, once a rank: `python -m tasks.train.worker ORDER.json`."""

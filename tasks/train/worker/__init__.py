"""What torchrun runs, once a rank: `python -m infini_llama.tasks.train.worker JOB.json`."""

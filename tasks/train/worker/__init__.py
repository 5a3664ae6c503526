"""The program that torchrun starts once per rank: `python -m infini_llama.tasks.train.worker ATTEMPT_DIR`."""

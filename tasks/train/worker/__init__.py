"""The program that torchrun starts once per rank.

Its command is `python -m infini_llama.tasks.train.worker ATTEMPT_DIR`.
"""

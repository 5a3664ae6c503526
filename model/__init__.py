"""Llama and Infini-Llama in PyTorch: torch and the standard library, nothing else."""

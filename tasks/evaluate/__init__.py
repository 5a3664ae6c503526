"""Evaluation of a trained model: perplexity and passkey retrieval. Imports torch, not Prefect."""

"""Hugging Face folders, out of a run and into one."""

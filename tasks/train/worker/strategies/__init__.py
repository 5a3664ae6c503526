"""How a model is distributed over the ranks."""

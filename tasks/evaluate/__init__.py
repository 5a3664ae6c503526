"""What a trained model knows: likelihood of text, and what it remembers of it. Torch, and no Prefect."""

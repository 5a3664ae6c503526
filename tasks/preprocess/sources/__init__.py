"""Sources of text: files, the Hugging Face hub, generated text."""

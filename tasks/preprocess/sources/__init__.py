"""Where text comes from: files, the Hugging Face hub, generated text."""

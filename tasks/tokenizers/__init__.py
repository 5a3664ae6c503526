"""Tokenizers, and the engines that run them."""

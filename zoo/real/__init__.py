"""A pretrained language model from the package index, prompts of real text, and drafters trained for it."""

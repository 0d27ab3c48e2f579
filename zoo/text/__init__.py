"""Defines and trains the text pair: two Llama models, their training samples, and their quality."""

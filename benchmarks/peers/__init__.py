"""Compares this engine with transformers and vLLM: the same weights, prompts and outputs."""

"""This engine compared with transformers and vLLM: the same weights, prompts and outputs."""

"""Models behind one contract: prompts become embeddings, forwards run over a KV cache."""

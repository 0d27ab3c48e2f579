"""LlamaGen: a Llama generates images as grids of codebook ids. Sun et al. 2024 (arXiv 2406.06525)."""

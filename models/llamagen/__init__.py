"""LlamaGen: images as grids of codebook ids, drawn one by one by a Llama. Sun et al. 2024 (arXiv 2406.06525)."""

"""CUDA backend: CUDA graphs and tree attention with a flash attention kernel."""

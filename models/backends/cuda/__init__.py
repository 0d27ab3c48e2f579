"""CUDA graphs and tree attention."""

"""Benchmarks this engine on a GPU; needs only torch and transformers."""

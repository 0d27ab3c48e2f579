"""Fsspec access, retries, the output directory, the checkpoint cache."""

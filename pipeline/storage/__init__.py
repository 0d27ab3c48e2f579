"""Reads and writes stores through fsspec: retries, listings, the output directory, the checkpoint cache."""

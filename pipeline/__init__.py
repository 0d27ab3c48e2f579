"""The data pipeline around the engine: sources, rows, media, prompts and output.

Reads files through fsspec, moves Arrow tables of fixed schemas, writes Parquet. Imports no torch.
"""

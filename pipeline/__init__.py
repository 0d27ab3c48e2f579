"""Sources, rows, media, prompts and the output: what happens to samples around the engine.

Reads files through fsspec, moves Arrow tables of fixed schemas, writes Parquet. Knows nothing of torch or of models.
"""

"""Derives further forms of a job's results from its published Parquet files."""

"""Benchmarks: each script writes its results as JSON, from which the tables and plots are generated."""

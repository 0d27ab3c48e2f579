"""Provides the commands `python -m jobs.NAME`, each a module with a `main(argv)` that returns the exit status."""

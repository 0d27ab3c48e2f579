"""Generates the pages of `docs/reference`, the tables of methods and the size table: `python -m docgen`."""

"""Compares methods on the rows of one job: their names, the figures of their outputs, tables and plots."""

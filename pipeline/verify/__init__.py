"""Decodes a share of a job's rows again and compares them with its output."""

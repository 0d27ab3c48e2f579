"""Measures the parts of a job that do not depend on its models."""

"""Rows at each stage: Arrow schemas and error codes."""

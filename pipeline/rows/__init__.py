"""Defines the Arrow schemas of rows at each stage, and the error codes of rows."""

"""Writes and publishes result files, and verifies, counts and lists the files of an output."""

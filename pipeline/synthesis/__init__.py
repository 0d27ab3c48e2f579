"""Rows, prompts, files and plan of synthesis jobs."""

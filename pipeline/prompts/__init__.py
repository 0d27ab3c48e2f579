"""Builds prompts of rows: templates, conversations and prompt options per row."""

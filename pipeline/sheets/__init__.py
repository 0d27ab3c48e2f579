"""Draws generated images: contact sheets of a run, and sheets of one output or two side by side."""

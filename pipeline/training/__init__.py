"""Runs the training of draft heads, on one or several workers, and counts tokens for restricted vocabularies."""

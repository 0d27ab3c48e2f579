"""Hints for job files: where a key is written, which key was meant, and the keys for words of other programs."""

"""Checks an output against its manifest and its recorded digests; changes nothing."""

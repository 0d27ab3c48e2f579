"""Decodes video files to clips of RGB frames in a subprocess."""

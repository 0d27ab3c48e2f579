"""Decodes images and videos to RGB pixels in a supervised subprocess."""

"""Measures the quality of generated images: agreement with their prompts, and the distance to reference images."""

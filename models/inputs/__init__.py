"""Prompts of a model: chat template, processor, images and clips, feature cache, prompt prefetch."""

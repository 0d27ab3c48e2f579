"""Prompt encoding: chat template, processor, images and clips, visual feature cache, prompt prefetch."""

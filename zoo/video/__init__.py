"""Defines and trains the video pair: two Qwen2.5-VL models, their training samples, and their quality."""

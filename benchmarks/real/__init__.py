"""Measures methods on pretrained models: real text, and dense scenes with a vision tower trained for them."""

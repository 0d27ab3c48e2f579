"""Checkpoints, architecture inspection, placement on devices, quantization, vocabulary slices."""

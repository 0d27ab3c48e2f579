"""Model loading: checkpoints, architecture inspection, placement on devices, quantization, draft vocabulary."""

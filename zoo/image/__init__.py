"""The models that make images: VQ model, text encoder, GPTs, and their quality."""

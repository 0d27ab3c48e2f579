"""Defines and trains the zoo's image models (VQ model, T5 text encoder, GPTs), and measures their quality."""

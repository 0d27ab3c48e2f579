"""This engine on a GPU; needs torch and transformers alone."""

"""Training samples for draft heads, and the models of a training worker."""

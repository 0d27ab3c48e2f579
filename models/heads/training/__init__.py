"""Training of drafters: states of the target, losses, the optimizer, and drafters cut from a target."""

"""Local files of users and checkpoints: regular files within bounds, and strict JSON. All layers may import it."""

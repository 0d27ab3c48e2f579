"""EAGLE and Medusa networks, their files and their training."""

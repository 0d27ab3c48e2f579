"""EAGLE and Medusa heads: networks, weight files and training."""

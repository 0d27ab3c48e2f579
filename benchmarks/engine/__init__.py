"""This engine alone: speeds at every batch size, and where a step's time goes."""

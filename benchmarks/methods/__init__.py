"""Runs every method on every scenario of the zoo, and checks the papers' claims."""

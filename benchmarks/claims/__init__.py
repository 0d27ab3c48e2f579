"""Decides the papers' claims from committed results, by one rule, and renders them."""

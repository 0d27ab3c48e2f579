"""Measures LANTERN on the zoo's image models: acceptance, cost, image quality, and the papers' claims."""

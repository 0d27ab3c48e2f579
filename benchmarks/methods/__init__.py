"""Every method on every scenario of the zoo, and the papers' claims."""

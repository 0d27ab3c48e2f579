"""Tiny trained pairs that ship with the repository, the synthetic worlds they know, and the command that rebuilds them."""

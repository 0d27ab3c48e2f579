"""Tiny trained pairs that ship with the repository, the synthetic world they know, and how they are rebuilt."""

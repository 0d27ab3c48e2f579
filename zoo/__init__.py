"""Trains, measures and stores the tiny models that ship with the repository, and the synthetic world they know."""

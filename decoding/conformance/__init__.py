"""Contract of drafters, tree policies and acceptance rules as checks that run on a small random target."""

"""Save a bandit to a file and load it."""

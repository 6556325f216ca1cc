"""Laws of the expected reward of each arm in closed form."""

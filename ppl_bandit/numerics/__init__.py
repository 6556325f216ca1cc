"""Numbers that know no program: draws, laws, tails, compilation, and the look of a figure."""

"""Check and convert what callers pass: numbers, arms, contexts, rewards, CSV files and DataFrames."""

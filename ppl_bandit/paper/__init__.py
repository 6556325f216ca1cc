"""The paper's evaluation: its settings, our runs of them, and its figures."""

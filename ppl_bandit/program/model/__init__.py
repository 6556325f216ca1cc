"""The reward model: its validation and its readings."""

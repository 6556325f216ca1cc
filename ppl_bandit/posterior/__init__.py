"""A live posterior: compile the engine, learn rows, decide, fall back to another engine."""

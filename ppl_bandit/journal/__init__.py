"""The event log of an experiment: its events, its identity, its replay and its audit."""

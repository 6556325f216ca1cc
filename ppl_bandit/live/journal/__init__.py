"""Experiments as a stream of events: what an event is, and where streams are kept."""

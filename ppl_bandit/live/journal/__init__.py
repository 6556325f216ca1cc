"""Experiments as a stream of events: what an event is, where streams are kept, and what is folded from them."""

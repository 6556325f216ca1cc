"""Deciders: processes that decide from published posteriors, without reading the stream of events."""

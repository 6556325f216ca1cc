"""The event log of an experiment: events, projection, replay and audit; `stores` has the databases."""

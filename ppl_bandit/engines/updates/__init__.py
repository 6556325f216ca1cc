"""Updates: what each engine does with new rows."""

"""Abstract interpretation of jaxprs: one table of primitives, one interpreter, several domains."""

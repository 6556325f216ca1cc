"""The exact engine: prove, derive, certify."""

"""Proofs: which programs are conjugate, exactly or given a few sites, and the certificate of rows."""

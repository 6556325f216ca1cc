"""Closed-form laws of the arms' expected rewards."""

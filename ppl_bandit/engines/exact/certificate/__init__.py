"""Certify numerically that a log density is affine in the sufficient statistics."""

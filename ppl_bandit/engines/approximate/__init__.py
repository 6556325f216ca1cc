"""Engines that draw: nuts, svi, laplace and reweight, and the parts that they share."""

"""The inner block of a program, whose law is exact: its layout, families, densities and how they are read."""

"""What people see: the style of figures, and HTML pages."""

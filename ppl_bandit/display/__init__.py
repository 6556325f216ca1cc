"""What people see: the style of figures, HTML pages, JSON values, and lines of progress."""

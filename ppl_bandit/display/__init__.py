"""What people see: the style of figures, HTML pages, and lines of progress."""

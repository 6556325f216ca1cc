"""Starting points of the search for modes that the observed outcomes suggest."""

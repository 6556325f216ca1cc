"""Arguments of the command line: the parser, and what the names in them stand for."""

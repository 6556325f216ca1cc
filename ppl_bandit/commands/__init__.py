"""The command line: words become objects."""

"""Where event streams are kept: memory, SQLite, PostgreSQL."""

"""Event stores: in memory, SQLite, PostgreSQL."""

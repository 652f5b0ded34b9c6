"""A compiled step, read: its events, what they cost, and the memory that they hold."""

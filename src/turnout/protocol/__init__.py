"""Messages between processes: one file per link, used by both ends."""

"""Options: one declaration gives flag, YAML key, default, check and reference line. No torch."""

"""Which layout, schedule, transport and sizes: a memory and time model, its search, and its calibration."""

"""``mpidist bench``: how fast collectives are here, against a plain copy and against whoever else is installed."""

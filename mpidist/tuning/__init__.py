"""What the ranks of a launch cost: measured by `mpidist tune` only, stored, and read by rank 0 of later launches."""

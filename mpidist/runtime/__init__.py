"""What keeps a job of many ranks from hanging: the control channel, the exit hooks, shared memory, signals."""

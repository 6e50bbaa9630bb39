"""Variables that servers hold: where they lie, how workers read them, and how updates are applied."""

"""The side of a ps rank: what it holds, and its loop."""

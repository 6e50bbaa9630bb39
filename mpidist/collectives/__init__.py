"""Collectives: algorithms as data (`schedules`, listed in `algorithms`) and all that works on them.

`checker` proves a schedule, `cost` prices it, `simulator` plays it for any number of ranks, `executor` moves the bytes.
"""

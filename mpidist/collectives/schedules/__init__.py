"""The schedules: one file a family of algorithms, each a generator of rounds and nothing else.

Only `mpidist.collectives.algorithms` imports from here; everybody else asks its table.
"""

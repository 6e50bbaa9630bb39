"""Collective algorithms as pure data: rounds, one generator a file, and what is worked out from them.

Nothing here communicates: rounds are executed in `mpidist.collectives`, and proved, priced and simulated here.
"""

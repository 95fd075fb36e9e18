"""The vectorised twins: the same paths as `sim.events`, on the same coins, for many replications at once and without queues.

The file of a method has one function, `walk`: time and unit-time of a block of replications from tiles of outcomes.
"""

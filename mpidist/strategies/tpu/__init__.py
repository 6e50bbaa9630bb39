"""A mesh of ranks under TensorFlow's names for TPUs.

There are no TPUs behind MPI.  What `TPUStrategy` has beyond other strategies is that a replica may be a *group* of
devices, its *logical devices*; here they are ranks.
"""

"""A trace of what a communicator does (`tracer`), and how far the clocks of the nodes are apart (`clock`)."""

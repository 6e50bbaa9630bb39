"""Start the ranks of a job and watch them: what ``mpidist run`` is made of."""

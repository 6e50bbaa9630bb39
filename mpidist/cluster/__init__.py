"""Who takes part: the cluster and its tasks, where the ranks are, what each of them is, and which device it has."""

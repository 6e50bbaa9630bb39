"""All-reduces of lists: plans, which lists are taken, where results go, and what is bound of them."""

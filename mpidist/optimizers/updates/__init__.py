"""Where and how the step of a list of variables is carried out, once their gradients are summed or while they are."""

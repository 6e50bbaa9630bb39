"""The side of a worker: the variables on all servers, and how its optimizers have them updated."""

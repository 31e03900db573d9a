"""Where the examples lie in a graph and whether they are independent, learnt by running the function on few rows."""

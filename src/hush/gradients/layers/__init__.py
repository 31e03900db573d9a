"""How the gradients of examples are read at one operation: a file for each kind of layer."""

"""Features of pictures, learnt or made without any record."""

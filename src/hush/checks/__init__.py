"""What a model, a loss and an optimizer must be for the guarantee to hold."""

"""A bounded sum and a noise multiplier -> the released gradient."""

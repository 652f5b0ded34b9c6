"""The training step, and the loop around it that has all the side effects."""

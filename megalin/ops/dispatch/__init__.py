"""Backend choice, self-tests and operand checks, shared by all ops."""

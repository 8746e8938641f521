"""Softmax attention, causal and in windows, and DANet's attention without a softmax."""

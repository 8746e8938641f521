"""Softmax attention, causal and sliding-window, and DANet's attention without a softmax."""

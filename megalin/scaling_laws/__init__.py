"""Scaling laws: fits of losses over model size, tokens and FLOPs, and predictions from them."""

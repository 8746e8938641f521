"""Local tensor maths: a pure-PyTorch reference beside the dispatch of every op."""

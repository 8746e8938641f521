"""Choice tasks: answers to a question ranked by their log-probability, and bits per byte of the right one."""

"""Tables of the papers beside our own numbers: counted, planned, or read from run folders."""

"""The commands of the command line: `arguments/` has their arguments, and one module each runs them: it reads the
arguments, calls the library and prints."""

"""The options of the command line's commands, and where each of them is done."""

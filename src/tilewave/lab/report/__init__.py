"""One page from the records of a ladder run: every picture and table of `tilewave report`."""

"""Numbers in a few bits each, packed by optimum-quanto or hqq."""

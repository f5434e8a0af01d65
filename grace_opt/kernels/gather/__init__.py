"""The kept channels of keys, copied out."""

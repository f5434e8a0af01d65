"""The settings of a cache: objects that check themselves, and the file that holds them."""

"""Best-exchange local search: the loop of `local_search`, and when an exchange is an improvement."""

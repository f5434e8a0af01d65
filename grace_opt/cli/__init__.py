"""The command line; no other room imports it. `app` has the commands, `tables` and `figures` their output."""

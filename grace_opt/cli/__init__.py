"""The command line; nobody imports it. `app` has the commands, `tables` and `figures` what they show."""

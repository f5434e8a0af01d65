"""The command line; no other room imports it. `app` puts it together from the commands; `tables` and `figures` show."""

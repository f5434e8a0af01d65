"""Internal helpers shared by several packages; not part of the API."""

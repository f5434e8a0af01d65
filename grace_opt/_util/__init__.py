"""Nobody's API: what several rooms use and no user should see."""

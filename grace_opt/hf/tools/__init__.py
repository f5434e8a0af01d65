"""What is built on the cache: tuning, evaluation, learned masks, the demo, and other libraries' harnesses."""

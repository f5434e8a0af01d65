"""Every k-subset in revolving-door order: what `exhaustive` runs. Compiled for the CPU only."""

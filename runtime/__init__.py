"""mlx-troupe: several language models side by side, each in its own process, driven from async Python."""

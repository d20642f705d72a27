"""Side-by-side measurements: `python -m benchmarks.overhead` prints one JSON object."""

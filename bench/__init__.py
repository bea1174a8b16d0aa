"""Benchmarks of torch_metalmm: `python -m bench --help`, method and measured facts in README.md."""

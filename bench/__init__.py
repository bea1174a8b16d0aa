"""Benchmarks of torch_metalmm: `python -m bench --help`, method in README.md, results in
results.md."""

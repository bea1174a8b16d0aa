"""Plug-ins of transformers, diffusers and sentence-transformers.

None is imported before the library that it belongs to; see torch_metalmm/__init__.py.
"""

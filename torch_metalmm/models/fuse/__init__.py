"""fuse_ and unfuse_: what a model computes, found by running it, in fewer ops."""

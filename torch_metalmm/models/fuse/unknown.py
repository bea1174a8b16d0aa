"""What is raised where a layer is not understood."""


class Unknown(Exception):
    """The layer does something that no recipe says."""

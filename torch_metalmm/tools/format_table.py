"""The table of docs/guide/formats.md: `python -m torch_metalmm.tools.format_table` prints it."""

from __future__ import annotations

from .info import bits_per_weight, format_rows

FAMILIES = {"dense": "dense", "block": "blocks", "affine": "MLX affine"}


def markdown() -> str:
    """One row per format of metal/formats.def; the groups of an affine codec share a row."""
    lines = ["| format | family | values per block | bits per weight |", "|---|---|---|---|"]
    affine: dict[str, list[tuple[str, str]]] = {}
    for f in format_rows():
        bits = bits_per_weight(f)
        if f["layout"] != "affine":
            family, values = FAMILIES[f["layout"]], f["block_values"]
            lines.append(f"| `{f['name']}` | {family} | {values} | {bits} |")
        else:
            codec, group = f["name"].split("_g")
            affine.setdefault(codec, []).append((group, bits))
    for codec, groups in affine.items():
        names = ", ".join(f"`{codec}_g{group}`" for group, _ in groups)
        sizes = ", ".join(group for group, _ in groups)
        bits = ", ".join(bits for _, bits in groups)
        lines.append(f"| {names} | {FAMILIES['affine']} | {sizes} | {bits} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())

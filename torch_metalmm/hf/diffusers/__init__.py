"""Plug-ins of diffusers: from_pretrained packs (quantizer), save_pretrained keeps (save)."""

"""PEFT's adapters on packed layers."""

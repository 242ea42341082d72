"""Offline export: shard sets to safetensors, torch and OCDBT/Zarr3 trees."""
